"""The tasks of a pipeline: pure functions of files that write files, one manifest each.

A pipeline is cut into segments where a step needs all documents. A `ShardTask` takes the documents of one shard through
a segment. Between segments, `RepeatTask` finds what repeats in a part of the range of hashes, and `ConnectTask` joins
near duplicates. A task whose manifest is there is done; any machine may do any task of a phase.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tutti.data.corpus import duplicates
from tutti.data.corpus.accounts import Account
from tutti.data.corpus.documents import SCHEMA, Dropped, Outcome, sizes
from tutti.data.corpus.duplicates import Verdict
from tutti.data.corpus.files import atomic, complete, read_json, write_json
from tutti.data.corpus.reading import read
from tutti.data.corpus.sketches import IdWriter, SketchWriter
from tutti.data.corpus.steps.duplicates import Meeting
from tutti.data.corpus.steps.mix import Mix, domain_bytes
from tutti.data.corpus.steps.step import Step

if TYPE_CHECKING:
    from tutti.data.corpus.segments import Segment

DROPPED = pa.schema([
    ("id", pa.string()), ("step", pa.string()), ("reason", pa.string()), ("detail", pa.string()),
    ("bytes", pa.int64()), ("sample", pa.string()),
])  # fmt: skip


class Context:
    """What a pool gives to a task: where to tell progress, and whether an earlier attempt crashed or hung."""

    careful = False

    def tick(self, documents: int, size: int) -> None:
        """Tell that so many documents and bytes were done."""


@dataclass(frozen=True)
class Task:
    """A unit of work. `segment` says where its files are."""

    segment: Segment

    @property
    def manifest(self) -> Path:
        raise NotImplementedError

    @property
    def name(self) -> str:
        raise NotImplementedError

    def done(self) -> dict[str, Any] | None:
        return complete(self.manifest.parent, self.manifest)

    def run(self, context: Context) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class SumTask(Task):
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
class FreeTask(Task):
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
class RepeatTask(Task):
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
        found = duplicates.repeats(self.segment.sketched, self.part, self.parts)
        if self.segment.meeting.connects:
            found = duplicates.without_self(found)
        with atomic(self.manifest.with_suffix(".npy")) as file:
            np.save(file, found, allow_pickle=False)
        write_json(
            self.manifest, {"files": {self.manifest.with_suffix(".npy").name: file.entry}, "repeats": len(found)}
        )


@dataclass(frozen=True)
class ConnectTask(Task):
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
        found = duplicates.connected(self.segment.sketched, pairs, scratch)
        with atomic(self.manifest.with_suffix(".npy")) as file:
            np.save(file, found, allow_pickle=False)
        write_json(
            self.manifest, {"files": {self.manifest.with_suffix(".npy").name: file.entry}, "repeats": len(found)}
        )


@dataclass(frozen=True)
class ShardTask(Task):
    """Take one shard's documents through the steps of a segment."""

    shard: int = 0

    @property
    def manifest(self) -> Path:
        return self.segment.folder / f"{self.shard:06}.json"

    @property
    def name(self) -> str:
        return f"shard {self.shard} of {len(self.segment.splits)} ({self.segment.splits[self.shard].label})"

    def run(self, context: Context) -> None:
        _Shard(self, context).run()


class _Shard:
    """One run of a ShardTask."""

    def __init__(self, task: ShardTask, context: Context):
        self.task, self.segment, self.context = task, task.segment, context
        self.folder, self.stem = self.segment.folder, f"{task.shard:06}"
        self.lost: list[tuple[str, Dropped]] = []
        self.faults: list[dict[str, str]] = []
        self.domains: dict[str, int] = {}
        self.rows = 0

    def run(self) -> None:
        files: dict[str, Any] = {}
        accounts = {name: Account(name) for name in self.segment.accounts}
        output = self.folder / f"{self.stem}{self.segment.suffix}"
        sketch, ids = self.folder / f"{self.stem}.sketch", self.folder / f"{self.stem}.ids"
        meeting = self.segment.meeting
        runs: list[int] = []
        with ExitStack() as stack:
            file = stack.enter_context(atomic(output))
            writer = self.segment.writer(file)
            sketches = names = None
            if isinstance(meeting, Meeting):
                sketch_file, ids_file = stack.enter_context(atomic(sketch)), stack.enter_context(atomic(ids))
                sketches, names = SketchWriter(sketch_file), IdWriter(ids_file)
                files |= {sketch.name: sketch_file, ids.name: ids_file}
            for batch in self._through(accounts):
                writer.write(batch)
                if sketches is not None and names is not None:
                    sketches.add(meeting.sketch(batch, self.rows))
                    names.add(batch.column("id"))
                self.rows += len(batch)
                for domain, size in domain_bytes(batch, sizes(batch)).items():
                    self.domains[domain] = self.domains.get(domain, 0) + size
            writer.close()
            if sketches is not None and names is not None:
                sketches.flush()
                names.close()
                runs = sketches.runs
        files = {name: written.entry for name, written in {output.name: file, **files}.items()}
        files |= self._write_dropped()
        for account in accounts.values():
            account.balance()
        write_json(self.task.manifest, {
            "files": files, "documents": self.rows, "domains": self.domains, "runs": runs, "faults": self.faults,
            "accounts": [asdict(a) for a in accounts.values()],
        })  # fmt: skip
        self.poison.unlink(missing_ok=True)

    def _through(self, accounts: dict[str, Account]) -> Iterator[pa.RecordBatch]:
        for batch in self._input(accounts):
            documents, size = len(batch), int(sizes(batch).sum())
            for step, name in zip(self.segment.steps, self.segment.names, strict=True):
                account, begin = accounts[name], time.process_time()
                batch, lost = account.record(
                    batch, self._one_by_one(step, batch) if self.context.careful else step(batch)
                )
                account.seconds += time.process_time() - begin
                self.lost += [(name, d) for d in lost]
            self.context.tick(documents, size)
            yield batch

    def _input(self, accounts: dict[str, Account]) -> Iterator[pa.RecordBatch]:
        """The batches of the shard, read from its files or from the segment before: at least one, which may be
        empty."""
        before = self.segment.before
        if before is None:
            account = accounts["read"]
            begin = time.process_time()
            for batch, lost, faults in read(self.segment.splits[self.task.shard], self.segment.most):
                size = int(sizes(batch).sum())
                account.documents_in += len(batch) + len(lost)
                account.documents_out += len(batch)
                account.bytes_in += size + sum(d.size for d in lost)
                account.bytes_out += size
                for dropped in lost:
                    account.drop(dropped)
                self.lost += [("read", d) for d in lost]
                self.faults += [asdict(f) for f in faults]
                account.seconds += time.process_time() - begin
                if len(batch):
                    yield batch
                begin = time.process_time()
            if not account.documents_out:
                yield pa.RecordBatch.from_pylist([], SCHEMA)
            return
        path, row = before.folder / f"{self.stem}{before.suffix}", 0
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
            for batch in stream:
                account, begin = accounts[before.meeting_name], time.process_time()
                outcome = self._decided(before, batch, row)
                row += len(batch)
                batch, lost = account.record(batch, outcome)
                account.seconds += time.process_time() - begin
                self.lost += [(before.meeting_name, d) for d in lost]
                yield batch
            if not row:
                yield pa.RecordBatch.from_pylist([], stream.schema)

    def _decided(self, before: Segment, batch: pa.RecordBatch, row: int) -> Outcome:
        if isinstance(before.meeting, Mix):
            return before.meeting.apply(batch, self._fractions)
        return before.meeting.apply(batch, row, self._verdict)

    @cached_property
    def _verdict(self) -> Verdict:
        before = self.segment.before
        assert before is not None
        return Verdict(before.verdicts, before.sketched, before.older + self.task.shard)

    @cached_property
    def _fractions(self) -> dict[str, float]:
        before = self.segment.before
        assert before is not None and isinstance(before.meeting, Mix)
        return before.meeting.fractions(before.domains)

    # A document that ends the process, or on which a step never ends, is left out on the third attempt.

    @property
    def poison(self) -> Path:
        return self.folder / f"{self.stem}.attempts"

    def _one_by_one(self, step: Step, batch: pa.RecordBatch) -> Outcome:
        """As step(batch), with a note on disk of the document that is being worked on."""
        known = set(self.poison.read_text().splitlines()) if self.poison.exists() else set()
        pieces: list[Outcome] = []
        reasons: list[str | None] = []
        for i in range(len(batch)):
            piece = batch.slice(i, 1)
            mark = f"{step.name} {piece.column('source')[0].as_py()} {piece.column('id')[0].as_py()}".replace("\n", " ")
            if mark in known:
                pieces.append(Outcome(piece))
                reasons.append("crashed")
                continue
            with open(self.poison, "a") as file:
                at = file.tell()
                file.write(mark + "\n")
            outcome = step(piece)
            os.truncate(self.poison, at)
            self.context.tick(0, 0)
            pieces.append(outcome)
            reasons.append(outcome.reasons[0] if outcome.reasons else None)
        schema = next((p.batch.schema for p, r in zip(pieces, reasons, strict=True) if r != "crashed"), batch.schema)
        parts = [_widened(p.batch, schema) for p in pieces]
        cut: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for name in {name for p in pieces for name in p.cut}:
            zero = (np.zeros(1, np.int64), np.zeros(1, np.int64))
            columns = [p.cut.get(name, zero) for p in pieces]
            cut[name] = (np.concatenate([c[0] for c in columns]), np.concatenate([c[1] for c in columns]))
        details = [p.details[0] if p.details else None for p in pieces]
        whole = pa.Table.from_batches(parts).combine_chunks().to_batches() if parts else [batch]
        return Outcome(whole[0] if whole else batch, reasons, details, cut)

    def _write_dropped(self) -> dict[str, Any]:
        path = self.folder / f"{self.stem}.dropped.parquet"
        rows = [{"step": s, "id": d.id, "reason": d.reason, "detail": d.detail, "bytes": d.size, "sample": d.sample}
                for s, d in self.lost]  # fmt: skip
        with atomic(path) as file:
            pq.write_table(pa.Table.from_pylist(rows, DROPPED), file, compression="zstd")
        return {path.name: file.entry}


def _widened(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    columns = [
        batch.column(f.name) if f.name in batch.schema.names else pa.nulls(len(batch), f.type) for f in schema
    ]  # fmt: skip
    return pa.record_batch(columns, schema=schema)
