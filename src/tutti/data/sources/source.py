"""What a source is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import islice
from typing import Any

import numpy as np

from tutti.data.rows import BadRow, Rows, name_of


class Source(Rows):
    """Rows of a file or a dataset, by index. It can be pickled, so that worker processes read it.

    blocks: where runs of rows begin that are best read together (row groups of Parquet), with the number of rows
        last; None if rows are read one by one.
    """

    blocks: np.ndarray | None = None

    @property
    def columns(self) -> list[str]:
        """Names of the columns, of the first row unless the format says them."""
        return list(self.row(0))


class StreamingSource:
    """Rows that can only be read from the beginning of a shard.

    shards: number of shards.
    """

    shards: int

    def open(self, shard: int, start: int) -> Iterator[dict[str, Any] | BadRow]:
        """The rows of a shard from row `start` on. A row that cannot be read is a BadRow in its place."""
        raise NotImplementedError

    def name(self, shard: int, i: int) -> str:
        """The name of a row in errors."""
        return f"shard {shard}, row {i}"


class MappedStream(StreamingSource):
    """The rows of a streaming source through a function. `Stream` applies it to the rows of its own part only."""

    def __init__(self, source: StreamingSource, function: Callable[[dict[str, Any]], dict[str, Any]]):
        self.source, self.function, self.shards = source, function, source.shards

    def open(self, shard: int, start: int) -> Iterator[dict[str, Any] | BadRow]:
        return (row if isinstance(row, BadRow) else self.function(row) for row in self.source.open(shard, start))

    def name(self, shard: int, i: int) -> str:
        return self.source.name(shard, i)


class Regrouped(StreamingSource):
    """What a function makes of the rows of each shard, one shard at a time: windows of tokens, packs, windows of texts.

    function: rows of a shard -> features, as many as it likes; the same for the same rows.

    A stream that resumes inside a shard reads and regroups that shard from its beginning.
    """

    def __init__(
        self, source: StreamingSource, function: Callable[[Iterator[dict[str, Any]]], Iterator[dict[str, Any]]]
    ):
        self.source, self.function, self.shards = source, function, source.shards

    def open(self, shard: int, start: int) -> Iterator[dict[str, Any] | BadRow]:
        return islice(self._every(shard), start, None)

    def _every(self, shard: int) -> Iterator[dict[str, Any] | BadRow]:
        bad: list[BadRow] = []

        def good() -> Iterator[dict[str, Any]]:
            for row in self.source.open(shard, 0):
                if isinstance(row, BadRow):
                    bad.append(row)
                else:
                    yield row

        for sample in self.function(good()):
            yield from bad
            bad.clear()
            yield sample
        yield from bad

    def name(self, shard: int, i: int) -> str:
        return f"shard {shard}, group {i}"


class Joined(Source):
    """The rows of several sources, one source after the other."""

    def __init__(self, sources: Sequence[Any]):
        if not sources:
            raise ValueError("no sources to join")
        self.sources = list(sources)
        self.starts = np.concatenate([[0], np.cumsum([len(s) for s in self.sources])]).astype(np.int64)
        blocks = [getattr(s, "blocks", None) for s in self.sources]
        if all(b is not None for b in blocks):
            inner = [b[:-1] + start for b, start in zip(blocks, self.starts, strict=False)]  # pyright: ignore
            self.blocks = np.concatenate([*inner, self.starts[-1:]])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def _place(self, i: int) -> tuple[Any, int]:
        number = int(np.searchsorted(self.starts, i, side="right")) - 1
        return self.sources[number], i - int(self.starts[number])

    def row(self, i: int) -> dict[str, Any]:
        source, place = self._place(i)
        return source[place]

    def name(self, i: int) -> str:
        source, place = self._place(i)
        return name_of(source, place)

    def cell(self, i: int, column: str) -> Any:
        source, place = self._place(i)
        return source.cell(place, column) if isinstance(source, Rows) else source[place][column]


def needed(module: str, package: str, what: str) -> Any:
    """Import a module that only some formats need. Raises ImportError that names the extra."""
    try:
        return import_module(module)
    except ImportError as e:
        raise ImportError(f"{what} needs {package}; pip install {package!r}, or 'tutti[data]'") from e
