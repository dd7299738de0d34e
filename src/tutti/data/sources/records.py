"""Rows of a file between byte offsets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tutti.data.rows import MOST, BadRow
from tutti.data.sources.index import indexed, records
from tutti.data.sources.source import Source


def too_long(name: str) -> BadRow:
    return BadRow(f"{name}: more than {MOST:,} bytes, the most of a row; split it, or read with on_bad='skip'")


class Records(Source):
    """Lines of a file (records of CSV may span lines), read by their offsets."""

    kind = "lines"
    quote: bytes | None = None

    def __init__(self, path: str | Path, cache: str | Path | None = None, encoding: str = "utf-8"):
        self.path, self.encoding = Path(path), encoding
        index = indexed(self.path, self.kind, lambda p: records(p, self.quote), cache)
        self.start, self.stop, self.line = index["start"], index["stop"], index["line"]
        self._file: int | None = None

    def __len__(self) -> int:
        return len(self.start)

    def name(self, i: int) -> str:
        return f"{self.path}:{self.line[i]}"

    def read(self, i: int) -> bytes:
        """The bytes of a record. Raises BadRow for one that is too long."""
        if (count := int(self.stop[i] - self.start[i])) > MOST:
            raise too_long(self.name(i))
        if self._file is None:
            self._file = os.open(self.path, os.O_RDONLY)
        return os.pread(self._file, count, int(self.start[i]))

    def text(self, i: int) -> str:
        """The text of a record, without the end of its line. Raises UnicodeDecodeError."""
        return self.read(i).decode(self.encoding).rstrip("\r")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            os.close(self._file)  # pyright: ignore[reportArgumentType]
