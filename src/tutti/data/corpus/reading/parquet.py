"""Parquet: a document for each row."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from tutti.data.corpus.reading.jsonl import record_of
from tutti.data.corpus.reading.records import Fault, Item, dropped
from tutti.data.corpus.reading.splits import Source


def read_parquet(path: str, begin: int, end: int, source: Source, name: str, most: int) -> Iterator[Item]:
    try:
        file = pq.ParquetFile(path, memory_map=True)
    except (pa.ArrowInvalid, OSError) as error:
        yield Fault(name, "corrupt", str(error))
        return
    if source.text not in file.schema_arrow.names:
        raise ValueError(f"{path}: there is no column {source.text}; there are {', '.join(file.schema_arrow.names)}")
    for group in range(begin, file.metadata.num_row_groups if end < 0 else end):
        at = 0
        try:
            for batch in file.iter_batches(_rows(file, group), row_groups=[group]):
                for row in batch.to_pylist():
                    place = f"{name}@{group}.{at}"
                    at += 1
                    text = row.get(source.text)
                    if isinstance(text, str) and len(text.encode("utf-8", "replace")) > most:
                        yield dropped(place, "record_too_long", f"{len(text)} characters", text, len(text))
                    else:
                        yield record_of(row, place, source, str(row)[:1000].encode())
        except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
            yield Fault(name, "corrupt", f"row group {group}, after {at} rows: {error}")


def _rows(file: pq.ParquetFile, group: int) -> int:
    """How many rows of a group to decode at a time: about 16 MB by their mean. Compression may hide large ones."""
    meta = file.metadata.row_group(group)
    mean = meta.total_byte_size / max(meta.num_rows, 1)
    return max(1, min(1024, int((16 << 20) / max(mean, 1 << 14))))
