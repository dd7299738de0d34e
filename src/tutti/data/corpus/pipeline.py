"""From sources through steps to a clean corpus, restartable at any point, with every document accounted for."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from tutti.data.corpus.accounts import Account
from tutti.data.corpus.files import read_json, write_json
from tutti.data.corpus.finish import FinishTask, manifest_of
from tutti.data.corpus.native.tables import version
from tutti.data.corpus.pool import Failure, Here, Processes
from tutti.data.corpus.reading.splits import Source, Split, splits_of
from tutti.data.corpus.segments import Segment
from tutti.data.corpus.sketches import BYTES
from tutti.data.corpus.steps.duplicates import Meeting
from tutti.data.corpus.steps.mix import Mix
from tutti.data.corpus.steps.step import Step
from tutti.data.corpus.tasks import ConnectTask, FreeTask, RepeatTask, ShardTask, SumTask, Task
from tutti.progress import Count, silent

FORMAT = 1
"""Changes when the same pipeline would write other bytes."""


class Pool(Protocol):
    """Where tasks are done. `run` returns when every task is done or has failed."""

    workers: int  # processes of all machines
    first: bool  # whether this process is the one, or the first of those that call `run`

    def run(self, tasks: Sequence[Task], progress: Count = silent) -> list[Failure]: ...

    def close(self) -> None: ...


class CorpusError(RuntimeError):
    """Tasks failed. What was done stays: the same call does the rest."""


@dataclass(frozen=True)
class Corpus:
    """A finished corpus: the files of documents in `folder`, and the accounts of all steps."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def documents(self) -> int:
        return self.manifest["documents"]

    @property
    def files(self) -> list[Path]:
        """The files of documents, in order."""
        return [self.folder / "documents" / name for name in self.manifest["files"]]

    @property
    def accounts(self) -> list[Account]:
        return [Account(**a) for a in read_json(self.folder / "report.json")["steps"]]

    @property
    def faults(self) -> list[dict[str, str]]:
        """What was wrong with files of the input: file, reason, detail."""
        return read_json(self.folder / "report.json")["faults"]

    @property
    def key(self) -> str:
        """A hash of the content of all files."""
        entries = sorted((name, e["blake2b"]) for name, e in self.manifest["files"].items())
        return blake2b(repr(entries).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Pipeline:
    """Steps over the documents of sources.

    out: the folder of the result: `documents/` (a file for each shard), `dropped/`, `manifest.json`, `report.json`,
        `report.html`, and `work/` until it is finished.
    split: bytes of input of a shard. memory: bytes that all workers together may take for looking at hashes; batches of
        documents take about 200 MB a worker. longest: bytes of a record; longer ones are dropped.
    format: format of the result, "parquet" or "jsonl" (compressed by Zstandard).
    keep_work: keep `work/`, so that a run with other later steps begins after the steps that are the same.
    """

    steps: Sequence[Step]
    sources: Sequence[Source] = ()
    out: str | Path = "out/corpus"
    split: int = 64 << 20
    memory: int = 2 << 30
    longest: int = 64 << 20
    format: str = "parquet"
    keep_work: bool = False

    def __post_init__(self):
        if not self.sources:
            raise ValueError("a corpus needs at least one source of documents")
        if self.format not in ("parquet", "jsonl"):
            raise ValueError(f"format is {self.format!r}; give parquet or jsonl")
        for name, least in (("split", 1), ("memory", 1 << 20), ("longest", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least {least} bytes")
        if self.longest > 1 << 30:
            raise ValueError(f"longest is {self.longest}; give at most {1 << 30} bytes, as Arrow's batches have 2 GiB")
        for step in self.steps:
            if isinstance(step, Mix) and (unknown := step.weights.keys() - {s.name for s in self.sources}):
                names = ", ".join(sorted({s.name for s in self.sources}))
                raise ValueError(f"mix: no source has the domain {min(unknown)}; there are {names}")
            if not isinstance(step, Step):
                raise ValueError(f"{step!r} is not a step; wrap a function as Function(function=...)")

    @property
    def replaces(self) -> bool:
        """Whether `out` has a finished corpus of other sources or steps, which a run replaces when it ends."""
        manifest = manifest_of(Path(self.out))
        return manifest is not None and self._finish().done() is None

    def run(
        self, workers: int | None = None, pool: Pool | None = None, show: Callable[[str], Count] | None = None
    ) -> Corpus:
        """Do what is not done yet, and return the corpus.

        workers: processes; None: one for each core; 0: this process. pool: another pool, as of Ray, which the caller
        closes. show(phase): gives a function that shows the progress of a phase.
        Raises CorpusError if tasks failed, ValueError for a wrong config.
        """
        out = Path(self.out)
        _check_folder(out)
        out.mkdir(parents=True, exist_ok=True)
        own = Here() if workers == 0 else Processes(_cores() if workers is None else workers)
        with closing(own), _alone(out) if pool is None or pool.first else nullcontext():
            return self._run(out, pool or own, show or (lambda phase: silent))

    def _run(self, out: Path, pool: Pool, show: Callable[[str], Count]) -> Corpus:
        finish = self._finish()
        segments = finish.segments
        if (manifest := finish.done()) is not None:
            return Corpus(out, manifest)
        write_splits(out / "work" / "splits.json", self._splits())
        first = max((k for k, segment in enumerate(segments) if whole(segment)), default=0)
        for at, segment in list(enumerate(segments))[first:]:
            self._run_segment(segment, pool, show, f"{at + 1} of {len(segments)}")
        do([finish], pool, show("result"))
        manifest = finish.done()
        assert manifest is not None
        return Corpus(out, manifest)

    def _splits(self) -> list[Split]:
        return [split for source in self.sources for split in splits_of(source, self.split)]

    def _finish(self) -> FinishTask:
        key = {
            "splits": [s.key() for s in self._splits()], "longest": self.longest, "format": FORMAT,
            "python": version(), "reader": _version("fastwarc"),
        }  # fmt: skip
        return FinishTask(self, tuple(self._segments(Path(self.out) / "work", _key(key))))

    def _segments(self, work: Path, key: str) -> list[Segment]:
        """The segments of the pipeline, which end with a step that needs all documents, or with the last step."""
        segments: list[Segment] = []
        steps: list[Step] = []
        names: list[str] = []
        before: Segment | None = None
        for step, name in zip([*self.steps, None], [*unique_names(self.steps), ""], strict=True):
            if step is None or isinstance(step, Meeting | Mix):
                before_mix = isinstance(step, Mix)  # its options change nothing of what comes before it
                own = [self.format] if step is None else ["mix"] if before_mix else [step.key()]
                key = _key([key, [s.key() for s in steps] + own])
                before = Segment(
                    work / f"{len(segments)}-{key}",
                    tuple(steps),
                    tuple(names),
                    step,
                    name,
                    before,
                    self.longest,
                    self.format,
                )
                segments.append(before)
                key = _key([key, step.key()]) if before_mix else key
                steps, names = [], []
            else:
                steps.append(step)
                names.append(name)
        return segments

    def _run_segment(self, segment: Segment, pool: Pool, show: Callable[[str], Count], at: str) -> None:
        list(segment.older_sketches)  # a wrong index is an error before the work
        do([ShardTask(segment, k) for k in range(segment.shards)], pool, show(f"documents, pass {at}"))
        do([SumTask(segment)], pool, silent)
        if segment.before is not None and not self.keep_work:
            do([FreeTask(segment.before)], pool, silent)
        if isinstance(segment.meeting, Mix):
            segment.meeting.fractions(segment.domains)
        if isinstance(segment.meeting, Meeting):
            hashes = sum(sum(s.runs) for s in segment.sketched)
            parts = max(1, -(-hashes * BYTES * 6 // max(1, self.memory // pool.workers)))
            write_json(segment.folder / "repeats" / "parts.json", parts)
            do([RepeatTask(segment, k, parts) for k in range(parts)], pool, show(segment.meeting_name))
            if segment.meeting.connects:
                do([ConnectTask(segment, parts)], pool, show(f"{segment.meeting_name}: sets"))


def _check_folder(out: Path) -> None:
    """Raise ValueError if folders in `out` that a run would replace are not those of a corpus.

    `work` is told by its content: another rank of this job may have begun it, before there is a lock.
    """
    if (out / ".lock").exists():
        return
    others = [out / name for name in ("documents", "dropped", "index") if (out / name).exists()]
    if (out / "work").exists():
        others += [p for p in (out / "work").iterdir() if not re.fullmatch(_WORK, p.name)]
    if others:
        raise ValueError(f"{others[0]} was not written by a preparation of a corpus; choose another folder")


_WORK = r"\.?splits\.json.*|\d+-[0-9a-f]{16}"  # names in `work`


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """While the block lasts, no other run may prepare a corpus in this folder: it would remove its work."""
    with open(out / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another run is preparing a corpus in {out}; wait for it, or give another folder"
            ) from None
        yield


def whole(segment: Segment) -> bool:
    """Whether all shards of a segment are done, so that those before it are not needed."""
    return SumTask(segment).done() is not None and all(
        ShardTask(segment, k).done() is not None for k in range(segment.shards)
    )


def do(tasks: Sequence[Task], pool: Pool, progress: Count) -> None:
    """Do the tasks that are not done. Raises CorpusError that names those that failed."""
    failures = pool.run(tasks, progress)
    if failures:
        first = "\n".join(f"  {f.task}: {f.why}" for f in failures[:10])
        more = f"\n  and {len(failures) - 10} more" if len(failures) > 10 else ""
        raise CorpusError(
            f"{len(failures)} of {len(tasks)} tasks failed; the others are done, and the same command does the rest:\n"
            f"{first}{more}"
        )


def finished(out: Path) -> Corpus | None:
    """The finished corpus in a folder, if there is one with all its files."""
    manifest = manifest_of(out)
    return Corpus(out, manifest) if manifest is not None else None


def unique_names(steps: Sequence[Step]) -> list[str]:
    """The names of steps, numbered where they are equal."""
    names = ["read"]
    for step in steps:
        count = sum(name == step.name or name.startswith(f"{step.name} ") for name in names)
        names.append(step.name if not count else f"{step.name} {count + 1}")
    return names[1:]


def write_splits(path: Path, splits: list[Any]) -> None:
    rows = [{"source": asdict(s.source), "parts": [list(p) for p in s.parts]} for s in splits]
    if not path.exists() or read_json(path) != rows:
        write_json(path, rows)


def _key(value: Any) -> str:
    return blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def _version(package: str) -> str:
    """The version of an installed package, or ""."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
