"""JSON Lines: one JSON object a line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from tutti.data.rows import BadRow
from tutti.data.sources.records import Records
from tutti.data.sources.source import StreamingSource


class JsonLines(Records):
    """A file of JSON objects, one a line. Blank lines are skipped."""

    def row(self, i: int) -> dict[str, Any]:
        return parsed(self.read(i), self.name(i))


class CompressedJsonLines(StreamingSource):
    """Files of JSON objects compressed by gzip. Each file is a shard."""

    def __init__(self, paths: Sequence[str | Path]):
        self.paths = [Path(p) for p in paths]
        self.shards = len(self.paths)

    def open(self, shard: int, start: int) -> Iterator[dict[str, Any] | BadRow]:
        with gzip.open(self.paths[shard], "rb") as file:
            lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
            for number, line in islice(lines, start, None):
                try:
                    yield parsed(line, f"{self.paths[shard]}:{number}")
                except BadRow as error:
                    yield error

    def name(self, shard: int, i: int) -> str:
        return f"{self.paths[shard]}, row {i}"


def parsed(line: bytes, name: str) -> dict[str, Any]:
    """The object of a line. Raises BadRow."""
    try:
        row = json.loads(line)
    except ValueError as error:  # also what is not UTF-8
        raise BadRow(f"{name}: not JSON ({error}); correct the line, or read with on_bad='skip'") from None
    if not isinstance(row, dict):
        raise BadRow(f'{name}: a {type(row).__name__} where an object is needed; write {{"column": ...}}')
    return row
