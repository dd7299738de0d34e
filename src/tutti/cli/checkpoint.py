"""The verbs `tutti checkpoint` and `tutti reshard`: show, verify, compare and rewrite checkpoints."""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Annotated

import torch
import tyro

from tutti.checkpoint import folder as folders
from tutti.checkpoint.reader import CheckpointReader
from tutti.checkpoint.reshard import reshard as write_anew
from tutti.cli.tables import SHOWN, consoles, read, table
from tutti.config.options import call_verb
from tutti.ir.kind import kind_of
from tutti.launch.progress import progress
from tutti.plan.explain import mesh_name, size
from tutti.plan.plan import Plan

KINDS = {"param": "parameters", "buffer": "buffers", "master": "float32 masters"}


def checkpoint(argv: list[str]) -> int | None:
    """`tutti checkpoint show FOLDER`, `verify FOLDER`, `diff FOLDER FOLDER`."""
    return call_verb(
        {"show": show, "verify": verify, "diff": diff},
        "tutti checkpoint",
        "Show, verify and compare checkpoints.",
        argv,
    )


def show(folder: Annotated[Path, tyro.conf.Positional]) -> None:
    """Print the step, the plan and the tensors of a checkpoint.

    Args:
        folder: A checkpoint, or a run folder: its newest checkpoint is shown.
    """
    folder = find(folder)
    about, stored, console = folders.manifest(folder), CheckpointReader(folder), consoles()[0]
    console.print(f"{folder}: step {about['step']}, seed {about.get('seed')}")
    if "plan" in about:
        plan = Plan.from_json(json.dumps(about["plan"]))
        console.print(f"written under {plan.name} ({mesh_name(plan.mesh)}); any other plan may read it")
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for name, spec in stored.tensors.items():
        kind = kind_of(name)
        rows[KINDS.get(kind, kind)] += Counter(tensors=1, numbers=spec.numel, bytes=spec.bytes)
        rows[KINDS.get(kind, kind)][str(spec.dtype).removeprefix("torch.")] += 0
    shown = table("state", "tensors", "numbers", "bytes", "dtypes", left=("dtypes",))
    for kind, row in rows.items():
        dtypes = sorted(row.keys() - {"tensors", "numbers", "bytes"})
        shown.add_row(kind, f"{row['tensors']:,}", f"{row['numbers']:,}", size(row["bytes"]), ", ".join(dtypes))
    console.print(shown)
    data = [facts["bytes"] for name, facts in about["files"].items() if name.endswith(".distcp")]
    files = "a file" if len(data) == 1 else f"{len(data)} files"
    console.print(f"{files} of tensors, {size(sum(data))}, the largest {size(max(data, default=0))}")


def verify(folder: Annotated[Path, tyro.conf.Positional]) -> int:
    """Read every file and compare it with its checksum. The exit code is 1 if a file is damaged.

    Args:
        folder: A checkpoint, or a run folder: all of its checkpoints are verified.
    """
    console = consoles()[0]
    whole = (folder / folders.MANIFEST).exists()
    checkpoints = [folder] if whole else folders.trainer_checkpoints(folder) or _of_run(folder)
    faults = 0
    for path in checkpoints:
        with progress(f"reading {path}"):
            fault = folders.find_fault(path)
        files = {} if fault else folders.manifest(path)["files"]
        whole = f"complete: {len(files)} files, {size(sum(facts['bytes'] for facts in files.values()))}"
        console.print(f"{path}: {fault or whole}")
        faults += bool(fault)
    return int(faults > 0)


def diff(first: Annotated[Path, tyro.conf.Positional], second: Annotated[Path, tyro.conf.Positional]) -> int:
    """Compare the tensors of two checkpoints, whatever plans wrote them. The exit code is 1 if values differ.

    Args:
        first: A checkpoint, or a run folder: its newest checkpoint is read.
        second: The checkpoint or run folder to compare with.
    """
    console = consoles()[0]
    first, second = find(first), find(second)
    for path in (first, second):
        folders.check(path)
    console.print(f"{first} and {second}")
    a, b, (one, other) = (
        CheckpointReader(first),
        CheckpointReader(second),
        (folders.manifest(x) for x in (first, second)),
    )
    for what in ("step", "seed"):
        if one.get(what) != other.get(what):
            console.print(f"{what}: {one.get(what)} and {other.get(what)}")
    alone = [*((name, first) for name in sorted(a.tensors.keys() - b.tensors.keys())),
             *((name, second) for name in sorted(b.tensors.keys() - a.tensors.keys()))]  # fmt: skip
    for name, where in alone:
        console.print(f"{name} is only in {where}")
    rows = []
    both = [name for name in a.tensors if name in b.tensors]
    with progress("comparing") as tell:
        for done, name in enumerate(both):
            tell.count(done, len(both), name)
            if a.tensors[name] != b.tensors[name]:
                rows.append((name, float("inf"), f"{a.tensors[name]} and {b.tensors[name]}"))
            elif far := _far(a.whole(name), b.whole(name)):
                rows.append((name, *far))
    if rows:
        shown = table("tensor", "largest difference", "elements that differ")
        for name, far, what in sorted(rows, key=lambda row: (-row[1], row[0]))[:SHOWN]:
            shown.add_row(name, f"{far:.3g}", what)
        console.print(shown)
    console.print(f"{len(both) - len(rows)} of {len(both)} tensors are equal")
    return int(bool(rows or alone))


def _far(a: torch.Tensor, b: torch.Tensor) -> tuple[float, str] | None:
    """The largest absolute difference and the number of elements that differ, or None if all are equal."""
    differ = (a != b) & ~(a.isnan() & b.isnan()) if a.is_floating_point() else a != b
    if not (count := int(differ.sum())):
        return None
    return (a[differ].double() - b[differ].double()).abs().max().item(), f"{count:,} of {a.numel():,}"


def reshard(
    source: Annotated[Path, tyro.conf.Positional], out: Annotated[Path, tyro.conf.Positional], plan: Path
) -> None:
    """Rewrite a checkpoint with the shards of another plan. Needs neither a GPU nor other processes.

    You can train under another plan without it: each rank reads its shards from any checkpoint.

    Args:
        source: A checkpoint, or a run folder: its newest checkpoint is read.
        out: New folder to write the checkpoint to.
        plan: A saved plan for the same model, from `tutti plan --save` or a run's plan.json.
    """
    if not plan.is_file():
        raise ValueError(f"--plan {plan}: no such file; write one with `tutti plan --save`, or take a run's plan.json")
    source, chosen = find(source), read(plan)
    with progress(f"writing {out}") as tell:
        written = write_anew(source, chosen, out, tell.count)
    print(f"{written}: written under {chosen.name} ({mesh_name(chosen.mesh)})")


def find(folder: Path) -> Path:
    """A checkpoint, or the newest complete checkpoint of a run. Incomplete newer ones are reported on stderr.

    Raises ValueError if there is none.
    """
    if folders.is_step_checkpoint(folder):
        return folder
    newest = folders.latest(_of_run(folder)[0].parent, lambda said: print(said, file=sys.stderr))
    if newest is None:
        raise ValueError(f"{folder} has no complete checkpoint; `tutti checkpoint verify {folder}` says why")
    return newest


def _of_run(folder: Path) -> list[Path]:
    """The checkpoints of a run of `tutti train`, of a folder of `Checkpoints`, or of a Trainer, the newest first."""
    of_trainer = [x / folders.TRAINER_STATE for x in (folder, *reversed(folders.trainer_checkpoints(folder)))]
    for place in (folder / folders.CHECKPOINTS, folder, *of_trainer):
        if checkpoints := folders.folders(place):
            return checkpoints
    raise ValueError(f"{folder} is neither a checkpoint nor a run folder with checkpoints")
