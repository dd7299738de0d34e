"""Read the files of a corpus into batches of documents."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pyarrow as pa

from tutti.data.corpus.documents import Dropped
from tutti.data.corpus.reading.files import read_file
from tutti.data.corpus.reading.records import Fault, Item, Record, batches
from tutti.data.corpus.reading.splits import UNREADABLE, Split


def read(split: Split, most: int) -> Iterator[tuple[pa.RecordBatch, list[Dropped], list[Fault]]]:
    """The documents of a split, in batches, with the records that are none and the faults of its files.

    most: bytes of a record; longer ones are dropped without taking the memory.
    """
    return batches(_all(split, most), split.source.name)


def _all(split: Split, most: int) -> Iterator[Item]:
    for path, kind, begin, end in split.parts:
        name = os.fsencode(os.path.relpath(path, split.source.root)).decode("utf-8", "backslashreplace")
        for item in _items(split, path, kind, begin, end, name, most):
            if isinstance(item, Record):
                item.source = name
            yield item


def _items(split: Split, path: str, kind: str, begin: int, end: int, name: str, most: int) -> Iterator[Item]:
    if kind == "jsonl":
        from tutti.data.corpus.reading.jsonl import read_jsonl

        return read_jsonl(path, begin, end, split.source, name, most)
    if kind == "parquet":
        from tutti.data.corpus.reading.parquet import read_parquet

        return read_parquet(path, begin, end, split.source, name, most)
    if kind == "warc":
        from tutti.data.corpus.reading.warc import read_warc

        return read_warc(path, split.source, name, most)
    if kind == UNREADABLE:
        return iter([Fault(name, "not_readable", "it is a broken link, or no regular file")])
    return read_file(path, kind, split.source, name, most)
