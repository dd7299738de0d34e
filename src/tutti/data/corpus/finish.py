"""The last task: put the files of the last segment into place, write indexes and the report, remove the work."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from tutti.data.corpus.accounts import Account, total
from tutti.data.corpus.files import atomic, complete, read_json, write_json
from tutti.data.corpus.report import write_report
from tutti.data.corpus.segments import Segment
from tutti.data.corpus.shard import Context
from tutti.data.corpus.sketches import Ids, IdWriter, SketchWriter, joined, open_sketch
from tutti.data.corpus.steps.duplicates import Meeting
from tutti.data.corpus.tasks import Task

if TYPE_CHECKING:
    from tutti.data.corpus.pipeline import Pipeline


@dataclass(frozen=True)
class FinishTask(Task):
    """Make the folder of the result from the files of all segments. An interrupted one begins again."""

    pipeline: Pipeline
    segments: tuple[Segment, ...]

    @property
    def name(self) -> str:
        return "the result"

    def done(self) -> dict[str, Any] | None:
        manifest = manifest_of(Path(self.pipeline.out))
        return manifest if manifest and manifest["key"] == self.segments[-1].folder.name else None

    def run(self, context: Context) -> None:
        out, last = Path(self.pipeline.out), self.segments[-1]
        files: dict[str, Any] = {}
        dropped: dict[str, Any] = {}
        shards: list[list[Account]] = [[] for _ in range(last.shards)]
        faults: list[dict[str, str]] = []
        documents = 0
        for folder in ("documents", "dropped"):
            shutil.rmtree(out / f".{folder}", ignore_errors=True)
            (out / f".{folder}").mkdir(parents=True)
        for at, segment in enumerate(self.segments):
            for shard in range(segment.shards):
                manifest = read_json(segment.folder / f"{segment.stem(shard)}.json")
                shards[shard] += [Account(**a) for a in manifest["accounts"]]
                faults += manifest["faults"]
                name = f"{segment.stem(shard)}.dropped.parquet"
                dropped[f"{at}-{name}"] = manifest["files"][name]
                _link(segment.folder / name, out / ".dropped" / f"{at}-{name}")
                if segment is last:
                    name = f"{segment.stem(shard)}{segment.suffix}"
                    files[name] = {**manifest["files"][name], "documents": manifest["documents"]}
                    documents += manifest["documents"]
                    _link(segment.folder / name, out / ".documents" / name)
        (out / "manifest.json").unlink(missing_ok=True)  # it is of other documents
        for folder in ("documents", "dropped"):
            shutil.rmtree(out / folder, ignore_errors=True)
            (out / f".{folder}").rename(out / folder)
        for segment in self.segments:
            if isinstance(segment.meeting, Meeting) and segment.meeting.index:
                write_index(out / "index" / segment.meeting_name, segment, last)
        accounts = total(shards)
        write_report(out, accounts, faults, last.domains)
        manifest = {
            "key": last.folder.name, "documents": documents, "bytes": accounts[-1].bytes_out, "files": files,
            "dropped": dropped, "steps": [s.key() for s in self.pipeline.steps],
            "sources": [asdict(s) for s in self.pipeline.sources],
        }  # fmt: skip
        write_json(out / "manifest.json", json.loads(json.dumps(manifest, default=str)))
        if not self.pipeline.keep_work:
            shutil.rmtree(out / "work")


def manifest_of(out: Path) -> dict[str, Any] | None:
    """The manifest of the finished corpus in a folder, if there is one with all its files."""
    return complete(out / "documents", out / "manifest.json")


def write_index(folder: Path, segment: Segment, last: Segment) -> None:
    """The hashes of the documents that the finished corpus has, with their ids, for later corpora."""
    shards = []
    for shard, sketched in enumerate(segment.sketched[segment.older :]):
        ids, stem = Ids(sketched.ids), segment.stem(shard)
        rows = np.zeros(len(ids), bool)
        saved = last.folder / f"{stem}.{segment.meeting_name}.npy"
        if saved.exists():
            rows[np.load(saved)] = True
        every = joined([run.range() for run in open_sketch(sketched.path, sketched.runs)])
        every = every.take(np.flatnonzero(rows[every.row]) if len(every) else np.empty(0, np.int64))
        with atomic(folder / f"{stem}.sketch") as file, atomic(folder / f"{stem}.ids") as names:
            writer, ids_writer = SketchWriter(file), IdWriter(names)
            writer.add(every)
            writer.flush()
            ids_writer.add(pa.array([ids[k] for k in range(len(ids))], pa.string()))
            ids_writer.close()
        entries = {"sketch": file.entry, "ids": names.entry}
        shards.append({"stem": stem, "runs": writer.runs, "documents": len(ids), "files": entries})
    write_json(folder / "index.json", {"key": segment.meeting.sketch_key(), "shards": shards})


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copyfile(source, target)
