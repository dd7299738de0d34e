"""Plain text: a row for each line, or for each file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tutti.data.rows import BadRow
from tutti.data.sources.records import Records
from tutti.data.sources.source import Source


class TextLines(Records):
    """A file of text. Each line that is not blank is a row, `{"text": line}`."""

    def row(self, i: int) -> dict[str, Any]:
        try:
            return {"text": self.text(i)}
        except UnicodeDecodeError as error:
            raise BadRow(f"{self.name(i)}: {error}; give the encoding, or read with on_bad='skip'") from None


class TextFiles(Source):
    """Files of text. Each file is a row, `{"text": content, "path": path}`."""

    def __init__(self, paths: Sequence[str | Path], encoding: str = "utf-8"):
        self.paths, self.encoding = [Path(p) for p in paths], encoding

    def __len__(self) -> int:
        return len(self.paths)

    def row(self, i: int) -> dict[str, Any]:
        try:
            return {"text": self.paths[i].read_text(self.encoding), "path": str(self.paths[i])}
        except (OSError, UnicodeDecodeError) as error:
            raise BadRow(f"{self.paths[i]}: {error}; give the encoding, or read with on_bad='skip'") from None

    def name(self, i: int) -> str:
        return str(self.paths[i])
