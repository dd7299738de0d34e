"""Steps document by document, after a task ended its process or hung: which document did it is found and left out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from tutti.data.corpus.documents import Outcome
from tutti.data.corpus.steps.step import Step

if TYPE_CHECKING:
    from tutti.data.corpus.shard import Context


class Careful:
    """Notes in a file on which document a step works. A note that is still there at the next attempt names a document
    that ended its process: it is dropped as "crashed"."""

    def __init__(self, path: Path):
        self.path = path

    def outcome(self, step: Step, batch: pa.RecordBatch, place: str, context: Context) -> Outcome:
        """As step(batch). place: the step and the number of documents that it has seen, for notes."""
        noted = set(self.path.read_text("utf-8").splitlines()) if self.path.exists() else set()
        pieces: list[Outcome] = []
        reasons: list[str | None] = []
        for i in range(len(batch)):
            note = f"{place} {i}"
            if note in noted:
                pieces.append(Outcome(batch.slice(i, 1)))
                reasons.append("crashed")
                continue
            with open(self.path, "a", encoding="utf-8") as file:
                at = file.tell()
                file.write(f"{note}\n")
            piece = step(batch.slice(i, 1))
            os.truncate(self.path, at)
            context.tick(0, 0)
            pieces.append(piece)
            reasons.append(piece.reasons[0] if piece.reasons else None)
        schema = step(batch.slice(0, 0)).batch.schema
        whole = pa.Table.from_batches([_widened(p.batch, schema) for p in pieces]).combine_chunks().to_batches()[0]
        details = [p.details[0] if p.details else None for p in pieces]
        return Outcome(whole, reasons, details, _joined([p.cut for p in pieces]))

    def forget(self) -> None:
        self.path.unlink(missing_ok=True)


def _joined(cuts: list[dict[str, tuple[np.ndarray, np.ndarray]]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    none = (np.zeros(1, np.int64), np.zeros(1, np.int64))
    names = dict.fromkeys(name for cut in cuts for name in cut)
    columns = {name: [cut.get(name, none) for cut in cuts] for name in names}
    return {name: (np.concatenate([c[0] for c in x]), np.concatenate([c[1] for c in x])) for name, x in columns.items()}


def _widened(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch with all columns of a schema, of nulls where it has none."""
    columns = [
        batch.column(f.name) if f.name in batch.schema.names else pa.nulls(len(batch), f.type) for f in schema
    ]  # fmt: skip
    return pa.record_batch(columns, schema=schema)
