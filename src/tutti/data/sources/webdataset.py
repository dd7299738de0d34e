"""WebDataset: tar files whose consecutive members of one stem make a row."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

from tutti.data.rows import BadRow
from tutti.data.sources.decode import decoded
from tutti.data.sources.index import indexed
from tutti.data.sources.source import Source


class WebDataset(Source):
    """A tar file in the layout of WebDataset, without compression. Members are read by their offsets.

    `0001.jpg, 0001.cls, 0002.jpg, 0002.cls` are two rows with the columns `__key__`, `jpg` and `cls`. Values are
    decoded by their suffix: images (PIL), audio, json, txt, cls (int), npy; others are bytes.

    decode: whether to decode; otherwise all values are bytes.
    """

    def __init__(self, path: str | Path, cache: str | Path | None = None, decode: bool = True):
        self.path, self.decode = Path(path), decode
        index = indexed(self.path, "tar", _members, cache)
        self.names, self.offsets, self.sizes, self.starts = (
            index["name"], index["offset"], index["size"], index["start"]
        )  # fmt: skip
        self._file: int | None = None

    def __len__(self) -> int:
        return len(self.starts) - 1

    def name(self, i: int) -> str:
        return f"{self.path}:{_key(str(self.names[self.starts[i]]))[0]}"

    def row(self, i: int) -> dict[str, Any]:
        return self._read(i, None)

    def cell(self, i: int, column: str) -> Any:
        return self._read(i, column)[column]

    def _read(self, i: int, column: str | None) -> dict[str, Any]:
        """A row, or one column of it."""
        if self._file is None:
            self._file = os.open(self.path, os.O_RDONLY)
        row: dict[str, Any] = {}
        for m in range(int(self.starts[i]), int(self.starts[i + 1])):
            row["__key__"], kind = _key(str(self.names[m]))
            if column not in (None, kind):
                continue
            content = os.pread(self._file, int(self.sizes[m]), int(self.offsets[m]))
            if len(content) != self.sizes[m]:
                raise BadRow(f"{self.name(i)}: the file ends inside of {self.names[m]}; write or copy it again")
            row[kind] = decoded(content, kind, f"{self.path}:{self.names[m]}") if self.decode else content
        return row

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            os.close(self._file)  # pyright: ignore[reportArgumentType]


def _key(name: str) -> tuple[str, str]:
    """(key, suffix): a name is split at the first dot of its last part."""
    folder, slash, last = name.rpartition("/")
    stem, _, kind = last.partition(".")
    return folder + slash + stem, kind.lower()


def _members(path: Path) -> dict[str, np.ndarray]:
    try:
        with tarfile.open(path, "r:") as file:
            members = [m for m in file if m.isfile() and not m.name.rpartition("/")[2].startswith(".")]
    except tarfile.ReadError as error:
        raise ValueError(f"{path}: not a tar file without compression ({error}); decompress it first") from None
    keys = [_key(m.name)[0] for m in members]
    starts = [i for i in range(len(keys)) if i == 0 or keys[i] != keys[i - 1]]
    return {
        "name": np.array([m.name for m in members], dtype=np.str_),
        "offset": np.array([m.offset_data for m in members], np.int64),
        "size": np.array([m.size for m in members], np.int64),
        "start": np.array([*starts, len(members)], np.int64),
    }
