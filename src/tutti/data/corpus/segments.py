"""Where the files of a pipeline's tasks are, and what its tasks share.

A segment's folder is named after everything that its content depends on: the input, and all steps up to it. A run
with other steps later uses it again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tutti.data.corpus.duplicates import Sketched
from tutti.data.corpus.files import Checked, read_json
from tutti.data.corpus.reading.splits import Source, Split
from tutti.data.corpus.steps.duplicates import Meeting
from tutti.data.corpus.steps.step import Step


@dataclass(frozen=True)
class Segment:
    """Steps that look at one document at a time, and the step after them that needs all documents, if there is one.

    names: the steps' names in reports. before: the segment whose output is the input; None: the files of the corpus.
    """

    folder: Path
    steps: tuple[Step, ...]
    names: tuple[str, ...]
    meeting: Any
    meeting_name: str
    before: Segment | None
    most: int
    format: str

    def __getstate__(self) -> dict[str, Any]:
        """Without what is read from files when it is used: tasks are sent to other processes."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def splits(self) -> tuple[Split, ...]:
        path = self.folder.parent / "splits.json"
        return read_splits(path, path.stat().st_mtime_ns)

    @property
    def shards(self) -> int:
        return len(self.splits)

    @property
    def suffix(self) -> str:
        return ".arrows" if self.meeting is not None else {"parquet": ".parquet", "jsonl": ".jsonl.zst"}[self.format]

    @property
    def accounts(self) -> list[str]:
        """The names of all accounts of its tasks, in order."""
        return ["read" if self.before is None else self.before.meeting_name, *self.names]

    def stem(self, shard: int) -> str:
        return f"{shard:06}"

    def writer(self, file: Checked) -> Writer:
        return Writer(self.suffix, file)

    @cached_property
    def summary(self) -> list[dict[str, Any]]:
        """For each shard: its documents, the runs of its sketch, the bytes of its domains."""
        return read_json(self.folder / "shards.json")["shards"]

    @cached_property
    def domains(self) -> dict[str, int]:
        sums: dict[str, int] = {}
        for shard in self.summary:
            for domain, size in shard["domains"].items():
                sums[domain] = sums.get(domain, 0) + size
        return dict(sorted(sums.items()))

    @cached_property
    def sketched(self) -> list[Sketched]:
        """The sketches of older corpora, then those of the shards."""
        here = [
            Sketched(
                self.folder / f"{self.stem(k)}.sketch",
                tuple(s["runs"]),
                self.folder / f"{self.stem(k)}.ids",
                s["documents"],
            )
            for k, s in enumerate(self.summary)
        ]
        return [*self.older_sketches, *here]

    @property
    def older(self) -> int:
        """The number of shards of older corpora."""
        return len(self.older_sketches)

    @cached_property
    def older_sketches(self) -> list[Sketched]:
        if not isinstance(self.meeting, Meeting):
            return []
        return [s for path in self.meeting.indexes() for s in read_index(path, self.meeting)]

    @property
    def verdicts(self) -> list[Path]:
        """The files of what repeats."""
        folder = self.folder / "repeats"
        if isinstance(self.meeting, Meeting) and self.meeting.connects:
            return [folder / "connected.npy"]
        parts = read_json(folder / "parts.json")
        return [folder / f"{k:05}-of-{parts:05}.npy" for k in range(parts)]


class Writer:
    """Writes batches: Arrow's stream format between segments, Parquet or JSON Lines at the end. All batches have the
    columns of the first."""

    def __init__(self, suffix: str, file: Checked):
        self._suffix, self._file, self._schema = suffix, file, None
        self._writer: Any = None

    def write(self, batch: pa.RecordBatch) -> None:
        if self._suffix != ".arrows":
            batch = batch.drop_columns(["raw"])
        if self._schema is None:
            self._open(batch.schema)
        elif batch.schema != self._schema:
            raise ValueError(f"batches of one shard have columns {batch.schema.names} and {self._schema.names}")
        if self._suffix == ".jsonl.zst":
            import orjson

            lines = b"".join(orjson.dumps(_fields(row)) + b"\n" for row in batch.to_pylist())
            self._writer.write(lines)
        elif len(batch):
            self._writer.write_batch(batch)

    def _open(self, schema: pa.Schema) -> None:
        self._schema = schema
        if self._suffix == ".arrows":
            options = pa.ipc.IpcWriteOptions(compression="lz4")
            self._writer = pa.ipc.new_stream(self._file, schema, options=options)
        elif self._suffix == ".parquet":
            self._writer = pq.ParquetWriter(self._file, schema, compression="zstd", compression_level=1)
        else:
            import zstandard

            self._writer = zstandard.ZstdCompressor(3).stream_writer(self._file, closefd=False)  # pyright: ignore[reportArgumentType]

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _fields(row: dict[str, Any]) -> dict[str, Any]:
    """A row as JSON: its own fields again, and what steps added."""
    meta = json.loads(row.pop("meta") or "{}")
    return {k: v for k, v in row.items() if v is not None} | ({"meta": meta} if meta else {})


@cache
def read_splits(path: Path, time: int) -> tuple[Split, ...]:
    return tuple(
        Split(Source(**row["source"]), tuple((p, kind, b, e) for p, kind, b, e in row["parts"]))
        for row in read_json(path)
    )


def read_index(path: Path, meeting: Meeting) -> Iterator[Sketched]:
    """The sketches of an older corpus, from its index.json. Raises ValueError if they were made with other options."""
    index, key = read_json(path), json.loads(json.dumps(meeting.sketch_key()))
    if index["key"] != key:
        differing = [k for k, v in key.items() if index["key"].get(k) != v]
        raise ValueError(f"{meeting.name}: the index {path} was made with other {', '.join(differing) or 'options'}")
    for shard in index["shards"]:
        sketch, ids = (path.with_name(f"{shard['stem']}.{end}") for end in ("sketch", "ids"))
        yield Sketched(sketch, tuple(shard["runs"]), ids, shard["documents"])
