"""Which documents, or parts of them, repeat an earlier one: from the sketches of all shards.

A document's number is `shard << 32 | row`; of equal hashes the lowest number stays. Shards of older corpora come
first. A part
of the range of hashes is looked at at a time, so the memory that it takes is chosen. Of near duplicates, equal keys of
bands are pairs; sets of documents that pairs connect are joined, and the lowest number of each set stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tutti.data.corpus import native
from tutti.data.corpus.sketches import Hashes, Ids, joined, open_sketch

REPEAT = np.dtype([("document", "<u8"), ("twin", "<u8"), ("begin", "<u4"), ("end", "<u4")])
"""A document, or its bytes [begin, end), that repeats the document `twin`."""


@dataclass(frozen=True)
class Sketched:
    """A shard's sketch, the lengths of its runs, and its file of ids."""

    path: Path
    runs: tuple[int, ...]
    ids: Path
    documents: int


def hash_range(part: int, parts: int) -> tuple[int, int]:
    """The hashes of a part: first and last."""
    return (part << 64) // parts, (((part + 1) << 64) // parts) - 1


def repeats(shards: Sequence[Sketched], part: int, parts: int) -> np.ndarray:
    """All but the first of equal hashes in a part of their range, (n,) REPEAT in the order of their documents."""
    first, last = hash_range(part, parts)
    pieces: list[Hashes] = []
    documents: list[np.ndarray] = []
    for shard, sketch in enumerate(shards):
        for run in open_sketch(sketch.path, sketch.runs):
            piece = run.range(first, last)
            pieces.append(piece)
            documents.append(piece.row.astype(np.uint64) | np.uint64(shard << 32))
    every = joined(pieces)
    if not len(every):
        return np.empty(0, REPEAT)
    document = np.concatenate(documents)
    order = np.lexsort((every.begin, document, every.hash))
    hashes, document = every.hash[order], document[order]
    starts = np.flatnonzero(np.r_[True, hashes[1:] != hashes[:-1]])
    first_of = np.repeat(starts, np.diff(np.r_[starts, len(hashes)]))
    twins = document[first_of]
    begin, end = every.begin[order], every.end[order]
    # A run that repeats itself, "ha ha ha", keeps its first window.
    begin = np.where(document == twins, np.minimum(np.maximum(begin, end[first_of]), end), begin)
    later = np.ones(len(hashes), bool)
    later[starts] = False
    out = np.empty(int(later.sum()), REPEAT)
    out["document"], out["twin"] = document[later], twins[later]
    out["begin"], out["end"] = begin[later], end[later]
    return out[np.lexsort((out["begin"], out["document"]))]


def without_self(pairs: np.ndarray) -> np.ndarray:
    """Pairs of different documents, each once."""
    pairs = pairs[pairs["document"] != pairs["twin"]]
    return np.unique(pairs) if len(pairs) else pairs


def connected(shards: Sequence[Sketched], pairs: Sequence[Path], scratch: Path) -> np.ndarray:
    """Every document but the lowest of each set that pairs connect, with that lowest one, (n,) REPEAT.

    pairs: files of REPEAT. scratch: a file for the sets (8 bytes a document), so that they need not fit in memory.
    """
    starts = np.cumsum([0, *(s.documents for s in shards)]).astype(np.uint64)
    count = int(starts[-1])
    if not count:
        return np.empty(0, REPEAT)
    parents = np.memmap(scratch, np.uint64, "w+", shape=(count,))
    step = 1 << 22
    for at in range(0, count, step):
        parents[at : at + step] = np.arange(at, min(at + step, count), dtype=np.uint64)

    def dense(documents: np.ndarray) -> np.ndarray:
        return starts[documents >> np.uint64(32)] + (documents & np.uint64(0xFFFFFFFF))

    members: list[np.ndarray] = []
    for path in pairs:
        edges = np.load(path, mmap_mode="r")
        for at in range(0, len(edges), step):
            piece = edges[at : at + step]
            a, b = dense(piece["twin"]), dense(piece["document"])
            native.call("join_sets", len(piece), a, b, parents)
            members.append(np.unique(b))
    inside = np.unique(np.concatenate(members)) if members else np.empty(0, np.uint64)
    roots = _roots(parents, inside)
    inside, roots = inside[inside != roots], roots[inside != roots]
    del parents
    scratch.unlink()
    out = np.zeros(len(inside), REPEAT)
    out["document"], out["twin"] = _numbers(inside, starts), _numbers(roots, starts)
    return out


def _roots(parents: np.ndarray, members: np.ndarray) -> np.ndarray:
    roots = np.array(parents[members])
    while (above := parents[roots]).tolist() != roots.tolist():
        roots = np.array(above)
    return roots


def _numbers(dense: np.ndarray, starts: np.ndarray) -> np.ndarray:
    shard = np.searchsorted(starts, dense, "right") - 1
    return (shard.astype(np.uint64) << np.uint64(32)) | (dense - starts[shard])


class Verdict:
    """What of one shard repeats something: by row."""

    def __init__(self, files: Sequence[Path], shards: Sequence[Sketched], shard: int):
        self._shards, self._ids = shards, {}
        first, last = np.uint64(shard << 32), np.uint64((shard + 1) << 32)
        parts = []
        for path in files:
            every = np.load(path, mmap_mode="r")
            begin, end = np.searchsorted(every["document"], [first, last])
            parts.append(np.array(every[begin:end]))
        repeats = np.concatenate(parts) if parts else np.empty(0, REPEAT)
        repeats = repeats[np.lexsort((repeats["begin"], repeats["document"]))]
        self.rows, self._repeats = (repeats["document"] & np.uint64(0xFFFFFFFF)).astype(np.int64), repeats

    def between(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """The duplicates among rows [first, last): their places, counted from `first`, and their REPEATs."""
        begin, end = np.searchsorted(self.rows, [first, last])
        return self.rows[begin:end] - first, self._repeats[begin:end]

    def id_of(self, document: int) -> str:
        shard, row = int(document) >> 32, int(document) & 0xFFFFFFFF
        if shard not in self._ids:
            self._ids[shard] = Ids(self._shards[shard].ids)
        return self._ids[shard][row]
