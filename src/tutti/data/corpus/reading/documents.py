"""Read the documents of a finished corpus."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_documents(path: Path, columns: list[str] | None = None) -> Iterator[Any]:
    """The batches of a file of documents, as record batches."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        if path.stat().st_size:
            yield from pq.ParquetFile(path).iter_batches(4096, columns=columns)
        return
    import orjson
    import pyarrow as pa

    from tutti.data.corpus.reading.lines import Line, lines

    rows: list[dict[str, Any]] = []
    for line in lines(str(path)):
        if not isinstance(line, Line):
            raise ValueError(f"{path} is {line.reason}: {line.detail}")
        rows.append(orjson.loads(line.content))
        if len(rows) == 4096:
            yield pa.RecordBatch.from_pylist([{c: r.get(c) for c in columns} if columns else r for r in rows])
            rows = []
    if rows:
        yield pa.RecordBatch.from_pylist([{c: r.get(c) for c in columns} if columns else r for r in rows])
