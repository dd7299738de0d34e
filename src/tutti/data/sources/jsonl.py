"""JSON Lines: one JSON object a line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from tutti.data.rows import MOST, BadRow
from tutti.data.sources.records import Records, too_long
from tutti.data.sources.source import StreamingSource

CHUNK = 1 << 17  # bytes that are read at once


class JsonLines(Records):
    """A file of JSON objects, one a line. Blank lines are skipped."""

    def row(self, i: int) -> dict[str, Any]:
        return parsed(self.read(i), self.path, self.line[i])


class CompressedJsonLines(StreamingSource):
    """Files of JSON objects compressed by gzip. Each file is a shard."""

    def __init__(self, paths: Sequence[str | Path]):
        self.paths = [Path(p) for p in paths]
        self.shards = len(self.paths)

    def open(self, shard: int, start: int) -> Iterator[dict[str, Any] | BadRow]:
        path = self.paths[shard]
        try:
            with gzip.open(path, "rb") as file:
                for number, line in islice(_lines(file, path), start, None):
                    yield _row(line, path, number)
        except BadRow as error:  # in the place of the rest of a damaged file
            yield error

    def name(self, shard: int, i: int) -> str:
        return f"{self.paths[shard]}, row {i}"


def _lines(file: Any, path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, and their numbers. Of a line that is too long, its first `MOST` + 1 bytes.

    Raises BadRow where the file cannot be decompressed.
    """
    number, begun = 0, bytearray()
    try:
        while chunk := file.read1(CHUNK):  # no more at once: what lies before damage is returned
            *ended, rest = chunk.split(b"\n")
            if ended:
                ended[0] = bytes(begun) + ended[0]
                begun.clear()
            for line in ended:
                number += 1
                if len(line) > MOST or (line and not line.isspace()):
                    yield number, line[: MOST + 1]
            if len(begun) <= MOST:
                begun += rest
    except (OSError, EOFError, zlib.error) as error:
        raise BadRow(f"{path}:{number + 1}: cannot be decompressed from this line on ({error}); copy or write the file "
                     "again, or read the lines before with on_bad='skip'") from error  # fmt: skip
    if len(begun) > MOST or (begun and not begun.isspace()):
        yield number + 1, bytes(begun[: MOST + 1])


def _row(line: bytes, path: Path, number: int) -> dict[str, Any] | BadRow:
    try:
        if len(line) > MOST:
            raise too_long(f"{path}:{number}")
        return parsed(line, path, number)
    except BadRow as error:
        return error


def parsed(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """The object of a line of a file. Raises BadRow."""
    try:
        try:
            row = json.loads(line.decode())
        except ValueError:
            row = json.loads(line)  # also what has a byte order mark, or is UTF-16
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{path}:{number}: not JSON ({error}); correct the line, or read with on_bad='skip'") from None
    if not isinstance(row, dict):
        raise BadRow(f'{path}:{number}: a {type(row).__name__} where an object is needed; write {{"column": ...}}')
    return row
