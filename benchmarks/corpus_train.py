"""A model trained on a cleaned corpus beside one trained on the raw text, at equal numbers of tokens.

    python benchmarks/corpus_train.py [--quick] [--seeds 3]

The raw text is a planted corpus: 56 % clean English documents, and copies, garbage, other languages, faults of
encodings.
Both runs are one command each, `tutti train CONFIG`, whose text is a corpus config: without steps, and with steps for
repair, language, the rules of Gopher, C4 and FineWeb, and exact and near duplicates. Both learn a tokenizer of 4,096
tokens from
their own text and train the same Llama of 3 million parameters on the same number of tokens. They are scored in bits
for each byte of clean documents of another seed, which neither has seen: tokenizers differ, bytes do not.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import planted_corpus

CLEAN = """
[[step]]
type = "repair"
[[step]]
type = "duplicates"
equal = "words"
[[step]]
type = "language"
keep = ["en"]
[[step]]
type = "rules"
tables = ["gopher_repetition", "gopher_quality"]
[[step]]
type = "lines"
punctuation = false
[[step]]
type = "rules"
tables = ["fineweb"]
[[step]]
type = "near_duplicates"
"""
RAW = '[[step]]\ntype = "repair"\nmojibake = false\nform = ""\n'
RUN = """
out = "{out}"
seed = {seed}
[data]
source = "{corpus}"
cache = "{cache}"
[tokenizer]
vocab_size = 4096
[model]
type = "llama"
hidden_size = 192
num_hidden_layers = 4
num_attention_heads = 3
[model.options]
intermediate_size = 512
tie_word_embeddings = true
[batch]
size = 8
seq = 256
[optimizer]
lr = 2e-3
[schedule]
steps = {steps}
warmup = 20
[eval]
every = 1000000
"""


def bits_per_byte(folder: Path, texts: list[str], seq: int = 256) -> float:
    """The loss of a trained model on texts, each read from its beginning in windows of `seq` tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    total = size = 0.0
    with torch.no_grad():
        for text in texts:
            ids = [tokenizer.eos_token_id, *tokenizer(text)["input_ids"]]
            for begin in range(0, len(ids) - 1, seq):
                window = torch.tensor([ids[begin : begin + seq + 1]])
                if window.shape[1] > 1:
                    total += float(model(input_ids=window, labels=window).loss) * (window.shape[1] - 1)
            size += len(text.encode())
    return total / math.log(2) / size


def trained(folder: Path, name: str, steps: str, raw: Path, seed: int, count: int) -> tuple[Path, float]:
    corpus, run = folder / f"{name}.toml", folder / f"{name}-{seed}.train.toml"
    corpus.write_text(
        f'[corpus]\nout = "{folder}/{name}"\nsplit = "16 MB"\n[[source]]\npath = "{raw}"\ndomain = "web"\n{steps}'
    )
    out = folder / f"{name}-{seed}"
    run.write_text(RUN.format(out=out, seed=seed, corpus=corpus, cache=folder / "cache", steps=count))
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-m", "tutti", "train", run], check=True, stdout=subprocess.DEVNULL)
    return out, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, 60 steps")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for corpus_train.json")
    options = parser.parse_args()
    seeds, steps = (1, 60) if options.quick else (options.seeds, options.steps)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        planted_corpus.write(folder / "planted", 30_000_000)
        planted_corpus.write(folder / "other", 1_000_000, seed=99, shares={"clean": 1.0})
        paths = sorted((folder / "other/documents").iterdir())
        texts = [json.loads(line)["text"] for path in paths for line in path.read_text().splitlines()]
        for seed in range(seeds):
            for name, recipe in (("raw", RAW), ("clean", CLEAN)):
                out, seconds = trained(folder, name, recipe, folder / "planted/documents", seed, steps)
                row = {"text": name, "seed": seed, "tokens": steps * 8 * 256, "seconds": seconds,
                       "bits per byte": bits_per_byte(out, texts[:150])}  # fmt: skip
                rows.append(row)
                harness.say(f"{name:6} seed {seed}: {row['bits per byte']:.4f} bits a byte ({seconds:.0f} s)")
    result = {"benchmark": "corpus_train", **harness.environment(), "rows": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "corpus_train.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
