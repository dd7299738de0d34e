"""The options of tiny training jobs that proofs start, kill and start again."""

from __future__ import annotations

from pathlib import Path

TINY = [
    *("--data.held-out", "0.2", "--tokenizer.vocab-size", "300", "--batch.seq", "16", "--model.num-hidden-layers", "2"),
    *("--schedule.warmup", "2", "--eval.batches", "2", "--parallel.level", "O0", "--parallel.precision", "float32"),
    *("--sample.tokens", "2"),
]


def places(text: Path, out: Path) -> list[str]:
    """Where a job finds its text, and where it writes."""
    return ["--data.source", str(text), "--data.cache", str(text.parent / "cache"), "--out", str(out)]
