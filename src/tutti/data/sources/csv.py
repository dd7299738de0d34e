"""Comma- and tab-separated values with a header."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from tutti.data.rows import BadRow
from tutti.data.sources.records import Records


class Csv(Records):
    """A file of comma-separated values (RFC 4180) whose first record names the columns. All values are texts, unless
    `types` says otherwise.

    delimiter: by default a tab for `.tsv` files and a comma for others.
    types: column -> type, for instance `{"label": int}`.
    """

    kind, quote = "csv", b'"'

    def __init__(
        self,
        path: str | Path,
        cache: str | Path | None = None,
        encoding: str = "utf-8-sig",
        delimiter: str | None = None,
        types: dict[str, type] | None = None,
    ):
        super().__init__(path, cache, encoding)
        self.delimiter = delimiter or ("\t" if self.path.suffix == ".tsv" else ",")
        if not len(self.start):
            raise ValueError(f"{path} is empty; its first line must name the columns")
        self.header = self._values(0)
        self.start, self.stop, self.line = self.start[1:], self.stop[1:], self.line[1:]
        self.types = types or {}
        for name in self.types:
            if name not in self.header:
                raise ValueError(f"{path} has no column {name!r}; its columns are {', '.join(self.header)}")

    @property
    def columns(self) -> list[str]:
        return self.header

    def _values(self, i: int) -> list[str]:
        return next(csv.reader([self.text(i)], delimiter=self.delimiter, strict=True))

    def row(self, i: int) -> dict[str, Any]:
        try:
            values = self._values(i)
        except (csv.Error, UnicodeDecodeError) as error:
            raise BadRow(f"{self.name(i)}: {error}; correct the record, or read with on_bad='skip'") from None
        if len(values) != len(self.header):
            raise BadRow(
                f"{self.name(i)}: {len(values)} values for {len(self.header)} columns ({', '.join(self.header)}); "
                "quote values that contain the delimiter"
            )
        row: dict[str, Any] = dict(zip(self.header, values, strict=True))
        for name, kind in self.types.items():
            try:
                row[name] = kind(row[name])
            except ValueError:
                raise BadRow(f"{self.name(i)}: {name} is {row[name]!r}, not {kind.__name__}") from None
        return row
