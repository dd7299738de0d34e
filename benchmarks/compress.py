"""Recipes of compression on two language models that were trained here: bytes, perplexity, agreement, and decoding.

The models are those of `runs/code_lm.toml` and `runs/code_lm_35m.toml`, Llamas of 8 and 36 million parameters with tied
embeddings that have read Python's standard library; a model is trained first if its folder in `out` does not exist.
Every recipe sees the same calibration data from the training text, is saved, and is read again from its files.
Distillation reads 4,096 tokens in a step, in bfloat16 (autocast). By model and recipe:

- `bytes`: of the safetensors files. `from float32`, `from bfloat16`: how often smaller than the model in these dtypes.
- `perplexity`: of held-out text, and `change`: relative to that of the model in float32.
- `agreement`: how often the most likely next token is that of the model in float32, on the held-out text.
- `seconds`: of processor time of the recipe, which other work on the machine lengthens somewhat.
- `memory`: bytes of the weights in an engine of the model in bfloat16, and `tokens/s`: that it decodes, one sequence at
  a time, in a second of processor time on one thread; `times faster`: than the engine of the model in bfloat16 without
  a recipe. Engines take turns; medians of rounds. `float32` and `bfloat16` are the models without a recipe.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
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
from tutti.data.text_folder import STDLIB, Document, read_corpus
from tutti.serve import Engine, Sampling

MODELS = {"8M": "code_lm", "36M": "code_lm_35m"}
LENGTH, ROWS = 256, 16  # of a batch
HELD_OUT, CALIBRATION, TRAINING = 8, 8, 400  # batches
PROMPT, TOKENS, ROUNDS = 64, 64, 7  # of decoding
RECIPES = {
    "code_lm": (
        "int8", "int8-e8", "w8a8-smooth-e8",
        "int4-g64", "int4-g64-hqq", "int4-g64-awq", "int4-g64-gptq", "int4-g32-zeros-gptq-e8",
        "int3-g64", "int3-g64-gptq", "int2-g32", "int2-g32-gptq", "int2-g32-s8-gptq-e4",
        "prune-2:4-magnitude", "prune-2:4-wanda", "prune-2:4-sparsegpt", "shrink-channels0.75", "lowrank-0.7",
        "mixed-2.75-s8-gptq-e4", "int2-g32-s8-gptq-e4+distill-192-lr0.0005",
    ),
    "code_lm_35m": (
        "int8", "int8-e8", "w8a8-smooth-e8", "int4-g64", "int4-g64-hqq", "int4-g64-gptq", "int4-g32-zeros-gptq-e8",
        "int3-g64-gptq", "int2-g32-s8-gptq-e4",
    ),
}  # fmt: skip


def windows(tokenizer: Any, documents: tuple[Document, ...], batches: int) -> list[dict[str, torch.Tensor]]:
    """Batches of windows, spread evenly over the text of documents, each followed by the end of text."""
    tokens: list[int] = []
    for document in documents:
        tokens += [*tokenizer(document.read())["input_ids"], tokenizer.eos_token_id]
    rows = torch.tensor(tokens[: len(tokens) // LENGTH * LENGTH]).view(-1, LENGTH)
    at = torch.linspace(0, len(rows) - 1, batches * ROWS).long()
    return [{"input_ids": x} for x in rows[at].split(ROWS)]


def tokens_read(config: Path) -> int:
    """Tokens that a model was trained on."""
    table = tomllib.loads(config.read_text())
    return table["schedule"]["steps"] * table["batch"]["size"] * table["batch"]["seq"]


@torch.no_grad()
def measured(model: Any, held_out: list[dict[str, torch.Tensor]]) -> tuple[float, torch.Tensor]:
    """The perplexity of text, and the most likely next tokens."""
    losses, likely = [], []
    for batch in held_out:
        logits = model(**batch, use_cache=False).logits[:, :-1].float()
        losses.append(F.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten()))
        likely.append(logits.argmax(-1))
    return math.exp(torch.stack(losses).mean()), torch.cat(likely)


def size(folder: Path) -> int:
    return sum(x.stat().st_size for x in folder.glob("*.safetensors"))


def decoding(folders: dict[str, Path], prompt: list[int], rounds: int) -> dict[str, dict[str, float]]:
    """How fast engines of some folders decode, and how large their weights are."""
    torch.set_num_threads(1)
    models = {
        name: _loaded(x).to(torch.float32 if name == "float32" else torch.bfloat16) for name, x in folders.items()
    }
    engines = {name: Engine(x, plan="single", memory=16 << 20, prefix_cache=False) for name, x in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for name, engine in engines.items():
        harness.say(f"{name}: prepares decoding")
        engine.warm_up()
    for i in range(rounds + 1):  # the first warms up
        for name, engine in engines.items():
            begin = time.process_time()
            engine.generate([prompt], Sampling(max_tokens=TOKENS, temperature=0, ignore_end=True))
            if i:
                seconds[name].append((time.process_time() - begin) / TOKENS)
    return {
        name: {
            "memory": sum(x.nbytes for x in [*engine.model.parameters(), *engine.model.buffers()]),
            "tokens/s": 1 / statistics.median(seconds[name]),
            "times faster": statistics.median(a / b for a, b in zip(seconds["bfloat16"], seconds[name], strict=True)),
        }
        for name, engine in engines.items()
    }


def _loaded(folder: Path) -> Any:
    """A model with or without quantized layers."""
    config = json.loads((folder / "config.json").read_text())
    return (load if "quantization_config" in config else AutoModelForCausalLM.from_pretrained)(folder).eval()


def compressed(name: str, quick: bool) -> dict[str, Any]:
    """The rows of a model."""
    config = Path(__file__).parents[1] / "runs" / f"{name}.toml"
    folder = Path("out", name, "model")
    if not folder.exists():
        harness.say(f"trains {config}")
        subprocess.run([sys.executable, "-m", "tutti", "train", str(config)], check=True, stdout=sys.stderr)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    corpus = read_corpus(STDLIB, ("*.py",))
    held_out = windows(tokenizer, corpus.held_out, 2 if quick else HELD_OUT)
    training = windows(tokenizer, corpus.train, 20 if quick else TRAINING)
    calibration = training[:: max(1, len(training) // CALIBRATION)][:CALIBRATION]
    perplexity, likely = measured(model, held_out)
    results = Path("out", name, "compressed-quick" if quick else "compressed")  # a run that was interrupted goes on
    results.mkdir(exist_ok=True)
    folders = {}
    for dtype in (torch.float32, torch.bfloat16):
        kind = str(dtype).removeprefix("torch.")
        folders[kind] = results / kind
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(folders[kind])
    whole, half = size(folders["float32"]), size(folders["bfloat16"])
    parameters = sum(x.numel() for x in model.parameters())
    harness.say(f"{parameters:,} parameters, perplexity {perplexity:.3f}, {whole:,} bytes")
    rows: dict[str, Any] = {x: {} for x in folders}
    for recipe in ("int4-g64", "int2-g32+distill-4") if quick else RECIPES[name]:
        folders[recipe] = out = results / recipe
        row = results / f"{recipe}.json"
        if not row.exists():
            row.write_text(json.dumps(_row(model, recipe, calibration, training, out, held_out, perplexity, likely)))
        rows[recipe] = json.loads(row.read_text())
        rows[recipe] |= {"from float32": whole / rows[recipe]["bytes"], "from bfloat16": half / rows[recipe]["bytes"]}
        harness.say(f"{recipe}: " + ", ".join(f"{key} {value:.4g}" for key, value in rows[recipe].items()))
    for recipe, decoded in decoding(
        folders, held_out[0]["input_ids"][0, :PROMPT].tolist(), 2 if quick else ROUNDS
    ).items():
        rows[recipe] |= decoded
    return {"parameters": parameters, "perplexity": perplexity,
            "bytes": {"float32": whole, "bfloat16": half}, "tokens read": tokens_read(config),
            "rows": rows}  # fmt: skip


def _row(
    model: Any, recipe: str, calibration: Any, training: Any, out: Path, held_out: Any, perplexity: float, likely: Any
) -> dict[str, float]:
    """Compress a model with a recipe into a folder, and measure what was saved."""
    begin = time.process_time()
    with torch.autocast("cpu", torch.bfloat16, enabled="distill" in recipe):
        compressed = tutti.compress(model, recipe, calibration, training=training if "distill" in recipe else None)
    seconds = time.process_time() - begin
    compressed.save(out)
    changed, tokens = measured(_loaded(out), held_out)
    return {"bytes": size(out), "perplexity": changed, "change": changed / perplexity - 1,
            "agreement": (tokens == likely).float().mean().item(), "seconds": seconds}  # fmt: skip


def run(quick: bool, only: str | None) -> dict[str, Any]:
    chosen = [only] if only else ["8M"] if quick else [*MODELS]
    return {x: compressed(MODELS[x], quick) for x in chosen}


if __name__ == "__main__":
    harness.main(run, __file__, ["transformers"], [*MODELS])
