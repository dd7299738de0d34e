"""One shard's documents through the steps of a segment: read, decide, account, write."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tutti.data.corpus.accounts import Account
from tutti.data.corpus.careful import Careful
from tutti.data.corpus.documents import BATCH_DOCUMENTS, SCHEMA, Dropped, Outcome, sizes
from tutti.data.corpus.duplicates import Verdict
from tutti.data.corpus.files import Checked, atomic, write_json
from tutti.data.corpus.reading import read
from tutti.data.corpus.sketches import IdWriter, SketchWriter
from tutti.data.corpus.steps.duplicates import Meeting
from tutti.data.corpus.steps.mix import Mix, domain_bytes

if TYPE_CHECKING:
    from tutti.data.corpus.segments import Segment

ROW = "row of "
"""Begins the name of a column with the row that a document had in the shard when a step wrote an index: which documents
are left at the end cannot be told by their ids, which need not differ."""


class Context:
    """What a pool gives to a task: where to tell progress, and whether an earlier attempt crashed or hung."""

    careful = False

    def tick(self, documents: int, size: int) -> None:
        """Tell that so many documents and bytes were done."""


def attempts_of(segment: Segment, shard: int) -> Path:
    """The file of notes on documents that ended the process of a shard's task."""
    return segment.folder / f"{segment.stem(shard)}.attempts"


class DroppedWriter:
    """Writes what was dropped as Parquet, in groups."""

    SCHEMA = pa.schema([
        ("id", pa.string()), ("step", pa.string()), ("reason", pa.string()), ("detail", pa.string()),
        ("bytes", pa.int64()), ("sample", pa.string()),
    ])  # fmt: skip

    def __init__(self, file: Checked):
        self._writer, self._rows = pq.ParquetWriter(file, self.SCHEMA, compression="zstd"), []

    def add(self, step: str, lost: list[Dropped]) -> None:
        self._rows += [
            {"step": step, "id": d.id, "reason": d.reason, "detail": d.detail, "bytes": d.size, "sample": d.sample}
            for d in lost
        ]
        while len(self._rows) >= BATCH_DOCUMENTS:
            self._flush(BATCH_DOCUMENTS)

    def close(self) -> None:
        self._flush(len(self._rows))
        self._writer.close()

    def _flush(self, count: int) -> None:
        if count:
            self._writer.write_table(pa.Table.from_pylist(self._rows[:count], self.SCHEMA))
            del self._rows[:count]


class ShardRun:
    """One attempt to take a shard through a segment."""

    def __init__(self, segment: Segment, shard: int, context: Context):
        self.segment, self.shard, self.context = segment, shard, context
        self.folder, self.stem = segment.folder, segment.stem(shard)
        self.accounts = {name: Account(name) for name in segment.accounts}
        self.faults: list[dict[str, str]] = []
        self.domains: dict[str, int] = {}
        self.rows = 0
        self.careful = Careful(attempts_of(segment, shard))

    def run(self) -> None:
        meeting = self.segment.meeting
        runs: list[int] = []
        index_rows: dict[str, list[np.ndarray]] = {}  # rows of indexes
        with ExitStack() as stack:
            files: dict[str, Checked] = {}

            def opened(end: str) -> Checked:
                files[f"{self.stem}{end}"] = file = stack.enter_context(atomic(self.folder / f"{self.stem}{end}"))
                return file

            writer = self.segment.writer(opened(self.segment.suffix))
            self.dropped = DroppedWriter(opened(".dropped.parquet"))
            sketches = names = None
            if isinstance(meeting, Meeting):
                sketches, names = SketchWriter(opened(".sketch")), IdWriter(opened(".ids"))
            for batch in self._through():
                if meeting is None:
                    batch = _without_rows(batch, index_rows)
                writer.write(batch)
                if isinstance(meeting, Meeting) and sketches is not None and names is not None:
                    sketches.add(meeting.sketch(batch, self.rows))
                    names.add(batch.column("id"))
                self.rows += len(batch)
                for domain, size in domain_bytes(batch, sizes(batch)).items():
                    self.domains[domain] = self.domains.get(domain, 0) + size
            writer.close()
            self.dropped.close()
            for name, rows in index_rows.items():
                np.save(opened(f".{name}.npy"), np.concatenate(rows), allow_pickle=False)
            if sketches is not None and names is not None:
                sketches.flush()
                names.close()
                runs = sketches.runs
        for account in self.accounts.values():
            account.balance()
        write_json(self.folder / f"{self.stem}.json", {
            "files": {name: file.entry for name, file in files.items()}, "documents": self.rows, "runs": runs,
            "domains": self.domains, "faults": self.faults, "accounts": [asdict(a) for a in self.accounts.values()],
        })  # fmt: skip
        self.careful.forget()

    def _through(self) -> Iterator[pa.RecordBatch]:
        """The batches that leave the last step; an empty one if there are none, for its columns."""
        schema, some = SCHEMA, False
        for batch in self._input():
            schema, documents, size = batch.schema, len(batch), int(sizes(batch).sum())
            for step, name in zip(self.segment.steps, self.segment.names, strict=True):
                if not len(batch):
                    break
                account, begin = self.accounts[name], time.process_time()
                if self.context.careful:
                    outcome = self.careful.outcome(step, batch, f"{name} {account.documents_in}", self.context)
                else:
                    outcome = step(batch)
                batch, lost = account.record(batch, outcome)
                account.seconds += time.process_time() - begin
                self.dropped.add(name, lost)
            self.context.tick(documents, size)
            if len(batch):
                some = True
                yield batch
        if not some:
            empty = pa.RecordBatch.from_pylist([], schema)
            for step in self.segment.steps:
                empty = step(empty).batch
            yield empty

    def _input(self) -> Iterator[pa.RecordBatch]:
        """The batches of the shard, read from its files or from the segment before."""
        before = self.segment.before
        account = self.accounts[self.segment.accounts[0]]
        begin = time.process_time()
        if before is None:
            for batch, lost, faults in read(self.segment.splits[self.shard], self.segment.most):
                size = int(sizes(batch).sum())
                account.documents_in += len(batch) + len(lost)
                account.documents_out += len(batch)
                account.bytes_in += size + sum(d.size for d in lost)
                account.bytes_out += size
                for dropped in lost:
                    account.drop(dropped)
                self.dropped.add("read", lost)
                self.faults += [asdict(f) for f in faults]
                account.seconds += time.process_time() - begin
                yield batch
                begin = time.process_time()
            return
        path, row = before.folder / f"{self.stem}{before.suffix}", 0
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
            for batch in stream:
                outcome = self._decided(before, batch, row)
                row += len(batch)
                batch, lost = account.record(batch, outcome)
                self.dropped.add(before.meeting_name, lost)
                account.seconds += time.process_time() - begin
                yield batch
                begin = time.process_time()
            if not row:
                outcome = self._decided(before, pa.RecordBatch.from_pylist([], stream.schema), 0)
                yield outcome.batch

    def _decided(self, before: Segment, batch: pa.RecordBatch, row: int) -> Outcome:
        if isinstance(before.meeting, Mix):
            return before.meeting.apply(batch, self._fractions)
        outcome = before.meeting.apply(batch, row, self._verdict)
        if not before.meeting.index:
            return outcome
        rows = pa.array(np.arange(row, row + len(batch), dtype=np.uint32))
        named = outcome.batch.append_column(f"{ROW}{before.meeting_name}", rows)
        return Outcome(named, outcome.reasons, outcome.details, outcome.cut)

    @cached_property
    def _verdict(self) -> Verdict:
        before = self.segment.before
        assert before is not None
        return Verdict(before.verdicts, before.sketched, before.older + self.shard)

    @cached_property
    def _fractions(self) -> dict[str, float]:
        before = self.segment.before
        assert before is not None and isinstance(before.meeting, Mix)
        return before.meeting.fractions(before.domains)


def _without_rows(batch: pa.RecordBatch, index_rows: dict[str, list[np.ndarray]]) -> pa.RecordBatch:
    """The batch without its columns of rows, which are added to `index_rows` by the name of their step."""
    names = [name for name in batch.schema.names if name.startswith(ROW)]
    for name in names:
        index_rows.setdefault(name.removeprefix(ROW), []).append(batch.column(name).to_numpy())
    return batch.drop_columns(names) if names else batch
