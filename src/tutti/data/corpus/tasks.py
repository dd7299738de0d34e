"""The tasks of a pipeline: pure functions of files that write files, one manifest each.

A pipeline is cut into segments where a step needs all documents. A `ShardTask` takes the documents of one shard through
a segment. Between segments, `RepeatTask` finds what repeats in a part of the range of hashes, and `ConnectTask` joins
near duplicates. A task whose manifest is there is done; any machine may do any task of a phase.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tutti.data.corpus import duplicates
from tutti.data.corpus.files import atomic, complete, read_json, write_json
from tutti.data.corpus.shard import Context, ShardRun, attempts_of
from tutti.data.corpus.steps.duplicates import Meeting

if TYPE_CHECKING:
    from tutti.data.corpus.segments import Segment


class Task:
    """A unit of work, whose files a manifest lists."""

    ticks: ClassVar[bool] = False
    """Whether it tells its progress, so that one that is silent for long hangs."""

    def notes(self) -> int:
        """How many documents have ended its process."""
        return 0

    @property
    def manifest(self) -> Path:
        raise NotImplementedError

    @property
    def name(self) -> str:
        raise NotImplementedError

    def done(self) -> dict[str, Any] | None:
        """Its manifest, if it and all its files are there."""
        return complete(self.manifest.parent, self.manifest)

    def run(self, context: Context) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class SegmentTask(Task):
    """A task of a segment, which says where its files are."""

    segment: Segment


def carry_out(task: Task, context: Context) -> None:
    """Do a task, and see that its files are there. Whoever has done the last task of a phase may begin the next one, so
    nobody else looks."""
    task.run(context)
    if task.done() is None:
        raise RuntimeError("it left no complete files")


@dataclass(frozen=True)
class SumTask(SegmentTask):
    """Sum up the manifests of all shards of a segment in one file."""

    @property
    def manifest(self) -> Path:
        return self.segment.folder / "shards.json"

    @property
    def name(self) -> str:
        return f"sum of {self.segment.shards} shards"

    def run(self, context: Context) -> None:
        manifests = [
            read_json(self.segment.folder / f"{self.segment.stem(k)}.json") for k in range(self.segment.shards)
        ]
        shards = [{key: m[key] for key in ("documents", "runs", "domains")} for m in manifests]
        write_json(self.manifest, {"files": {}, "shards": shards})


@dataclass(frozen=True)
class FreeTask(SegmentTask):
    """Remove the documents of a segment, which the next one has taken up, and their hashes if no index needs them."""

    @property
    def name(self) -> str:
        return f"space of {self.segment.folder.name}"

    def done(self) -> dict[str, Any] | None:
        return None if self._files() else {}

    def run(self, context: Context) -> None:
        for path in self._files():
            path.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        index = isinstance(self.segment.meeting, Meeting) and self.segment.meeting.index
        ends = (self.segment.suffix,) if index else (self.segment.suffix, ".sketch", ".ids")
        return [p for p in self.segment.folder.iterdir() if p.name.endswith(ends)]


@dataclass(frozen=True)
class RepeatTask(SegmentTask):
    """Find what repeats in one of `parts` parts of the range of hashes of a meeting."""

    part: int = 0
    parts: int = 1

    @property
    def manifest(self) -> Path:
        return self.segment.folder / "repeats" / f"{self.part:05}-of-{self.parts:05}.json"

    @property
    def name(self) -> str:
        return f"{self.segment.meeting.name}, part {self.part} of {self.parts}"

    def run(self, context: Context) -> None:
        repeats = duplicates.repeats(self.segment.sketched, self.part, self.parts)
        _save(self.manifest, duplicates.without_self(repeats) if self.segment.meeting.connects else repeats)


@dataclass(frozen=True)
class ConnectTask(SegmentTask):
    """Join the pairs of near duplicates into sets."""

    parts: int = 1

    @property
    def manifest(self) -> Path:
        return self.segment.folder / "repeats" / "connected.json"

    @property
    def name(self) -> str:
        return f"{self.segment.meeting.name}, sets"

    def run(self, context: Context) -> None:
        pairs = [RepeatTask(self.segment, k, self.parts).manifest.with_suffix(".npy") for k in range(self.parts)]
        scratch = self.manifest.with_name(f"sets-{os.getpid()}.scratch")
        _save(self.manifest, duplicates.connected(self.segment.sketched, pairs, scratch))


@dataclass(frozen=True)
class ShardTask(SegmentTask):
    """Take one shard's documents through the steps of a segment."""

    ticks: ClassVar[bool] = True
    shard: int = 0

    def notes(self) -> int:
        path = attempts_of(self.segment, self.shard)
        return path.read_bytes().count(b"\n") if path.exists() else 0

    @property
    def manifest(self) -> Path:
        return self.segment.folder / f"{self.shard:06}.json"

    @property
    def name(self) -> str:
        return f"shard {self.shard} of {len(self.segment.splits)} ({self.segment.splits[self.shard].label})"

    def run(self, context: Context) -> None:
        ShardRun(self.segment, self.shard, context).run()


def _save(manifest: Path, repeats: np.ndarray) -> None:
    path = manifest.with_suffix(".npy")
    with atomic(path) as file:
        np.save(file, repeats, allow_pickle=False)
    write_json(manifest, {"files": {path.name: file.entry}, "repeats": len(repeats)})
