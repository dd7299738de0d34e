"""Batches of documents for tests of corpora."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from tutti.data.corpus import Outcome
from tutti.data.corpus.documents import SCHEMA


def batch_of(texts: Sequence[str], **columns) -> pa.RecordBatch:
    """Documents with ids 0, 1, 2, ..."""
    rows = [
        {"id": str(i), "text": text, "source": "f", "domain": "d", **{k: v[i] for k, v in columns.items()}}
        for i, text in enumerate(texts)
    ]
    return pa.RecordBatch.from_pylist(rows, SCHEMA)


def texts_of(outcome: Outcome) -> list[str]:
    return outcome.batch.column("text").to_pylist()


def write_jsonl(path: Path, texts: Sequence[str], first: int = 0) -> Path:
    path.write_text("".join(json.dumps({"id": f"d{first + i}", "text": t}) + "\n" for i, t in enumerate(texts)))
    return path


def kill_on_poison(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Ends the process at a document with the word poison, as a fault in a library does."""
    if any("poison" in t for t in batch.column("text").to_pylist()):
        os.kill(os.getpid(), 9)
    return batch


def hang_on_poison(batch: pa.RecordBatch) -> pa.RecordBatch:
    while any("poison" in t for t in batch.column("text").to_pylist()):
        time.sleep(0.01)
    return batch
