"""What all readers yield: records, and what is no record and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from tutti.data.corpus.documents import BATCH_BYTES, BATCH_DOCUMENTS, SCHEMA, Dropped

SAMPLE = 200
"""Characters of a dropped text that reports keep."""


@dataclass
class Record:
    """One document as it was read; the fields are those of documents.SCHEMA."""

    id: str
    text: str = ""
    raw: bytes | None = None
    url: str | None = None
    meta: str | None = None
    source: str = ""

    @property
    def size(self) -> int:
        return len(self.text) + len(self.raw or b"") + len(self.meta or "")


@dataclass(frozen=True)
class Fault:
    """Something wrong with a file, such as a compressed file that ends in the middle. Its records until there are
    read."""

    file: str
    reason: str
    detail: str


Item = Record | Dropped | Fault


def dropped(id: str, reason: str, detail: str, content: bytes | str, size: int | None = None) -> Dropped:
    """A record that is no document."""
    size = len(content) if size is None else size
    text = content[: 4 * SAMPLE].decode("utf-8", "replace") if isinstance(content, bytes) else content
    return Dropped(encodable(id), reason, encodable(detail[:1000]), size, encodable(text[:SAMPLE]))


def encodable(text: str) -> str:
    """Without lone surrogates, which JSON and names of files can have and UTF-8 cannot."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def batches(
    items: Iterable[Item], domain: str, bytes_each: int = BATCH_BYTES
) -> Iterator[tuple[pa.RecordBatch, list[Dropped], list[Fault]]]:
    """Batches of about `bytes_each` bytes, with what was dropped and found wrong meanwhile."""
    records: list[Record] = []
    lost: list[Dropped] = []
    faults: list[Fault] = []
    size = 0
    for item in items:
        if isinstance(item, Record):
            records.append(item)
            size += item.size
        elif isinstance(item, Dropped):
            lost.append(item)
        else:
            faults.append(item)
        if size >= bytes_each or len(records) >= BATCH_DOCUMENTS or len(lost) >= BATCH_DOCUMENTS:
            yield _batch(records, domain), lost, faults
            records, lost, faults, size = [], [], [], 0
    if records or lost or faults:
        yield _batch(records, domain), lost, faults


def _batch(records: list[Record], domain: str) -> pa.RecordBatch:
    columns = [
        [r.id for r in records], [r.text for r in records], [r.raw for r in records], [r.url for r in records],
        [r.source for r in records], [domain] * len(records), [r.meta for r in records],
    ]  # fmt: skip
    return pa.record_batch([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)
