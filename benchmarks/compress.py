"""Recipes of compression on a language model that was trained here: bytes of files, perplexity, and agreement.

The model is that of `runs/code_lm.toml`, a Llama of 9 million parameters with tied embeddings that has read Python's
standard library; it is trained first if `out/code_lm/model` does not exist. Every recipe sees the same calibration data
from the training text, is saved, and is read again from its files. Distillation reads 4,096 tokens in a step, in
bfloat16 (autocast). By recipe:

- `bytes`: of the safetensors files. `from float32`, `from bfloat16`: how often smaller than the model in these dtypes.
- `perplexity`: of held-out text, and `change`: relative to that of the model in float32.
- `agreement`: how often the most likely next token is that of the model in float32, on the held-out text.
- `seconds`: of processor time of the recipe.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

import harness
import tutti
from tutti.compress.folder import load
from tutti.data.corpus import STDLIB, Document, read_corpus

CONFIG = Path(__file__).parents[1] / "runs" / "code_lm.toml"
MODEL = Path("out/code_lm/model")
LENGTH, ROWS = 256, 16  # of a batch
HELD_OUT, CALIBRATION, TRAINING = 8, 8, 400  # batches
RECIPES = (
    "int2-g32-s16-gptq-e4+distill-192-lr0.0005",
    "int8", "int8-e8", "w8a8-smooth-e8",
    "int4-g64", "int4-g64-hqq", "int4-g64-awq", "int4-g64-gptq", "int4-g32-zeros-gptq-e8",
    "int3-g64", "int3-g64-gptq", "int2-g32", "int2-g32-gptq", "int2-g32-s16-gptq-e4", "mixed-2.7-s16-gptq-e4",
    "prune-2:4-magnitude", "prune-2:4-wanda", "prune-2:4-sparsegpt", "shrink-channels0.75",
)  # fmt: skip
ROWS_DONE = Path("out/compress_rows.json")  # a run that was interrupted goes on


def windows(tokenizer: Any, documents: tuple[Document, ...], batches: int) -> list[dict[str, torch.Tensor]]:
    """Batches of windows, spread evenly over the text of documents, each followed by the end of text."""
    tokens: list[int] = []
    for document in documents:
        tokens += [*tokenizer(document.read())["input_ids"], tokenizer.eos_token_id]
    found = torch.tensor(tokens[: len(tokens) // LENGTH * LENGTH]).view(-1, LENGTH)
    at = torch.linspace(0, len(found) - 1, batches * ROWS).long()
    return [{"input_ids": x} for x in found[at].split(ROWS)]


def tokens_read() -> int:
    """Tokens that the model was trained on."""
    config = tomllib.loads(CONFIG.read_text())
    return config["schedule"]["steps"] * config["batch"]["size"] * config["batch"]["seq"]


@torch.no_grad()
def measured(model: Any, held_out: list[dict[str, torch.Tensor]]) -> tuple[float, torch.Tensor]:
    """The perplexity of text, and the most likely next tokens."""
    lost, likely = [], []
    for batch in held_out:
        logits = model(**batch, use_cache=False).logits[:, :-1].float()
        lost.append(F.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten()))
        likely.append(logits.argmax(-1))
    return math.exp(torch.stack(lost).mean()), torch.cat(likely)


def size(folder: Path) -> int:
    return sum(x.stat().st_size for x in folder.glob("*.safetensors"))


def run(quick: bool) -> dict[str, Any]:
    if not MODEL.exists():
        harness.say(f"trains {CONFIG}")
        subprocess.run([sys.executable, "-m", "tutti", "train", str(CONFIG)], check=True, stdout=sys.stderr)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    corpus = read_corpus(STDLIB, ("*.py",))
    held_out = windows(tokenizer, corpus.held_out, 2 if quick else HELD_OUT)
    training = windows(tokenizer, corpus.train, 20 if quick else TRAINING)
    calibration = training[:: max(1, len(training) // CALIBRATION)][:CALIBRATION]
    perplexity, likely = measured(model, held_out)
    parameters = sum(x.numel() for x in model.parameters())
    known = json.loads(ROWS_DONE.read_text()) if ROWS_DONE.exists() and not quick else {}
    rows: dict[str, Any] = known.get("rows", {}) if known.get("perplexity") == perplexity else {}
    with tempfile.TemporaryDirectory() as folder:
        for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
            AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype).save_pretrained(Path(folder, name))
        whole, half = size(Path(folder, "float32")), size(Path(folder, "bfloat16"))
        harness.say(f"{parameters:,} parameters, perplexity {perplexity:.3f}, {whole:,} bytes")
        for recipe in ("int4-g64", "int2-g32+distill-4") if quick else RECIPES:
            if recipe in rows:
                continue
            begun, out = time.process_time(), Path(folder, "compressed")
            with torch.autocast("cpu", torch.bfloat16, enabled="distill" in recipe):
                compressed = tutti.compress(
                    model, recipe, calibration, training=training if "distill" in recipe else None
                )
            seconds = time.process_time() - begun
            compressed.save(out)
            again = load(out) if compressed.report.layers else AutoModelForCausalLM.from_pretrained(out)
            found, tokens = measured(again.eval(), held_out)
            rows[recipe] = {
                "bytes": size(out), "from float32": whole / size(out), "from bfloat16": half / size(out),
                "perplexity": found, "change": found / perplexity - 1,
                "agreement": (tokens == likely).float().mean().item(), "seconds": seconds,
            }  # fmt: skip
            if not quick:
                ROWS_DONE.write_text(json.dumps({"perplexity": perplexity, "rows": rows}))
            harness.say(f"{recipe}: " + ", ".join(f"{key} {value:.4g}" for key, value in rows[recipe].items()))
    return {"parameters": parameters, "perplexity": perplexity, "bytes": {"float32": whole, "bfloat16": half},
            "tokens read": tokens_read(), "rows": rows}  # fmt: skip


if __name__ == "__main__":
    harness.main(run, __file__, ["transformers"])
