"""Batches of documents: Arrow record batches with these columns, and others that steps add.

id      string   the document's own id, or "FILE@PLACE": byte, row or record in its file
text    string   UTF-8; empty until a page is extracted
raw     binary   the page as it came, where the source has pages (HTML); null otherwise
url     string   or null
source  string   the file, relative to the folder of its source
domain  string   the name that the config gives the source
meta    string   all other fields of the record, as JSON; or null
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

pc: Any = pyarrow.compute  # its functions are made when it is imported
SCHEMA = pa.schema([
    ("id", pa.string()), ("text", pa.string()), ("raw", pa.binary()), ("url", pa.string()), ("source", pa.string()),
    ("domain", pa.string()), ("meta", pa.string()),
])  # fmt: skip

BATCH_BYTES = 8 << 20
BATCH_DOCUMENTS = 4096


@dataclass(frozen=True)
class Dropped:
    """A document, or a record that is no document, which a step left out.

    reason: a short code, the same for all documents of its kind. detail: what is special about this one, such as the
    id of the twin that stays. size: bytes of its text, or of the record.
    """

    id: str
    reason: str
    detail: str
    size: int
    sample: str


@dataclass(frozen=True)
class Outcome:
    """What a step made of a batch: the same rows, changed or not, and for each the reason to drop it or None.

    cut: parts that were removed from documents, by reason: how many and their bytes, (n,) int64 each.
    """

    batch: pa.RecordBatch
    reasons: Sequence[str | None] | None = None
    details: Sequence[str | None] | None = None
    cut: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)


def texts(batch: pa.RecordBatch) -> pa.StringArray:
    return batch.column("text")  # pyright: ignore[reportReturnType]


def sizes(batch: pa.RecordBatch) -> np.ndarray:
    """The bytes of each document's text, or of its page where there is no text yet, (n,) int64."""
    text, raw = pc.binary_length(batch.column("text")), pc.fill_null(pc.binary_length(batch.column("raw")), 0)
    return integers(pc.add(text, raw))


def integers(values: pa.Array) -> np.ndarray:
    """An Arrow array without nulls as int64."""
    return values.to_numpy(zero_copy_only=False).astype(np.int64)


def replace(batch: pa.RecordBatch, name: str, values: pa.Array) -> pa.RecordBatch:
    """The batch with a column of other values, or with a new last column."""
    at = batch.schema.get_field_index(name)
    if at < 0:
        return batch.append_column(name, values)
    return batch.set_column(at, batch.schema.field(at).with_type(values.type), values)
