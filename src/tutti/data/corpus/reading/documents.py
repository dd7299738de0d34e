"""Read the documents of a finished corpus."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_documents(path: str | Path, columns: list[str] | None = None) -> Iterator[Any]:
    """The batches of a file of documents, as record batches."""
    path = Path(path)
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        if path.stat().st_size:
            yield from pq.ParquetFile(path).iter_batches(4096, columns=columns)
        return
    import orjson

    from tutti.data.corpus.reading.lines import Line, lines

    rows: list[dict[str, Any]] = []
    for line in lines(str(path), most=1 << 31):
        if not isinstance(line, Line):
            raise ValueError(f"{path} is {line.reason}: {line.detail}")
        rows.append(orjson.loads(line.content))
        if len(rows) == 4096:
            yield _batch(rows, columns)
            rows = []
    if rows:
        yield _batch(rows, columns)


def _batch(rows: list[dict[str, Any]], columns: list[str] | None) -> Any:
    import pyarrow as pa

    names = columns or list(dict.fromkeys(name for row in rows for name in row))
    return pa.RecordBatch.from_pylist([{name: row.get(name) for name in names} for row in rows])
