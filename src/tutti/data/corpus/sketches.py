"""Hashes of the documents of a shard on disk, sorted in runs, so that any range of hashes is read without the rest.

A sketch is one file of runs. A run has four columns, one after the other: hash (uint64), row (uint32), begin and end
(uint32: the bytes in the document that the hash is of). `Index` says where the runs are. The file of identifiers has
the documents' own ids and can be read at any row.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from tutti.data.corpus.files import Checked

COLUMNS = (("hash", np.uint64), ("row", np.uint32), ("begin", np.uint32), ("end", np.uint32))
BYTES = sum(np.dtype(kind).itemsize for _, kind in COLUMNS)
RUN = 4 << 20
"""Hashes of a run, at most: their sort takes 160 MB."""


@dataclass(frozen=True)
class Hashes:
    """Columns of the same length: hashes, and the rows and bytes that they are of."""

    hash: np.ndarray
    row: np.ndarray
    begin: np.ndarray
    end: np.ndarray

    def __len__(self) -> int:
        return len(self.hash)

    @classmethod
    def of_documents(cls, hash: np.ndarray, row: np.ndarray) -> Hashes:
        zeros = np.zeros(len(hash), np.uint32)
        return cls(hash, row.astype(np.uint32), zeros, zeros)

    def take(self, order: np.ndarray) -> Hashes:
        return Hashes(self.hash[order], self.row[order], self.begin[order], self.end[order])


def joined(parts: Sequence[Hashes]) -> Hashes:
    return Hashes(*(
        np.concatenate([getattr(p, name) for p in parts]) if parts else np.empty(0, kind) for name, kind in COLUMNS
    ))  # fmt: skip


class SketchWriter:
    """Writes runs to an open file; `runs` has their lengths."""

    def __init__(self, file: Checked):
        self.file, self.runs, self._waiting, self._count = file, [], [], 0

    def add(self, hashes: Hashes) -> None:
        self._waiting.append(hashes)
        self._count += len(hashes)
        if self._count >= RUN:
            self.flush()

    def flush(self) -> None:
        run = joined(self._waiting)
        self._waiting, self._count = [], 0
        if len(run):
            run = run.take(np.argsort(run.hash, kind="stable"))
            for name, kind in COLUMNS:
                self.file.write(np.ascontiguousarray(getattr(run, name), kind).data)
            self.runs.append(len(run))


@dataclass(frozen=True)
class SortedRun:
    """A run of a sketch on disk, from byte `at`. It is read, not mapped: pages of a mapped file count as memory."""

    path: Path
    at: int
    count: int

    def range(self, first: int = 0, last: int = (1 << 64) - 1) -> Hashes:
        """The hashes in [first, last], with their columns."""
        with open(self.path, "rb", buffering=0) as file:

            def hash_at(row: int) -> int:
                return int.from_bytes(os.pread(file.fileno(), 8, self.at + 8 * row), "little")

            begin = bisect_left(range(self.count), first, key=hash_at)
            end = bisect_right(range(self.count), last, lo=begin, key=hash_at)
            columns, at = [], self.at
            for _, kind in COLUMNS:
                width = np.dtype(kind).itemsize
                data = os.pread(file.fileno(), width * (end - begin), at + width * begin)
                columns.append(np.frombuffer(data, kind))
                at += width * self.count
        return Hashes(*columns)


def open_sketch(path: Path, runs: Sequence[int]) -> list[SortedRun]:
    """The runs of a sketch."""
    return [SortedRun(path, BYTES * sum(runs[:k]), count) for k, count in enumerate(runs)]


class IdWriter:
    """Writes the ids of documents: their bytes to one file, and their ends (uint64) to `ends`."""

    def __init__(self, file: Checked):
        self.file, self.ends, self._at = file, [], 0

    def add(self, ids: pa.Array) -> None:
        for id in ids.to_pylist():
            content = id.encode()
            self.file.write(content)
            self._at += len(content)
            self.ends.append(self._at)

    def close(self) -> None:
        """Write the ends, and their number last."""
        self.file.write(np.array([*self.ends, len(self.ends)], np.uint64).tobytes())


class Ids:
    """The ids of a shard's documents, by row."""

    def __init__(self, path: Path):
        with open(path, "rb") as file:
            file.seek(-8, 2)
            size = file.tell()
            count = int(np.frombuffer(file.read(8), np.uint64)[0])
        self._start = size - 8 * count
        self._data = np.memmap(path, np.uint8, "r")
        self._ends = self._data[self._start : size].view(np.uint64)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, row: int) -> str:
        begin = int(self._ends[row - 1]) if row else 0
        return self._data[begin : int(self._ends[row])].tobytes().decode()
