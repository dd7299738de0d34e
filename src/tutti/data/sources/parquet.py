"""Parquet: rows by row groups."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from tutti.data.rows import BadRow
from tutti.data.sources.source import Source, needed

GROUPS = 8  # row groups in memory


class Parquet(Source):
    """A Parquet file. The last eight row groups that were read stay in memory.

    A shuffle of single rows reads a row group for almost every row; `Stream(shuffle="blocks")` reads each group once.

    columns: names of columns to read; None: all.
    """

    def __init__(self, path: str | Path, columns: list[str] | None = None):
        self.path, self.read_columns = Path(path), columns
        self._clear()
        file = self._open()
        sizes = [file.metadata.row_group(g).num_rows for g in range(file.num_row_groups)]
        self.blocks: np.ndarray = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        names = file.schema_arrow.names
        for name in columns or []:
            if name not in names:
                raise ValueError(f"{path} has no column {name!r}; its columns are {', '.join(names)}")
        self.names = columns or names

    @property
    def columns(self) -> list[str]:
        return list(self.names)

    def _clear(self) -> None:
        self._file, self._groups, self._lock = None, OrderedDict(), Lock()

    def _open(self) -> Any:
        if self._file is None:
            parquet = needed("pyarrow.parquet", "pyarrow", "Parquet")
            try:
                self._file = parquet.ParquetFile(self.path)
            except Exception as error:
                raise ValueError(f"{self.path}: not a Parquet file ({error})") from None
        return self._file

    def __len__(self) -> int:
        return int(self.blocks[-1])

    def row(self, i: int) -> dict[str, Any]:
        group = int(np.searchsorted(self.blocks, i, side="right")) - 1
        with self._lock:
            table = self._group(group, i)
        place = i - int(self.blocks[group])
        return table.slice(place, 1).to_pylist()[0]

    def _group(self, group: int, i: int) -> Any:
        if group not in self._groups:
            try:
                self._groups[group] = self._open().read_row_group(group, columns=self.read_columns)
            except OSError as error:
                raise BadRow(f"{self.name(i)}: row group {group} cannot be read ({error}); write it again") from None
            if len(self._groups) > GROUPS:
                self._groups.popitem(last=False)
        self._groups.move_to_end(group)
        return self._groups[group]

    def name(self, i: int) -> str:
        return f"{self.path}, row {i}"

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_file", "_groups", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._clear()
