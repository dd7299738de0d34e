"""Rewrite a checkpoint as the ranks of another plan would, in one process, one rank at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from tutti.checkpoint import folder as folders
from tutti.checkpoint.copies import Copies
from tutti.checkpoint.reader import CheckpointReader
from tutti.ir.kind import Kind, kind_of
from tutti.plan.layouts.boxes import boxes, is_owner
from tutti.plan.layouts.layout import devices
from tutti.plan.plan import Plan
from tutti.progress import Count, silent


def reshard(source: Path, plan: Plan, out: Path, progress: Count = silent) -> Path:
    """Write the same state under another plan. Returns the new checkpoint folder, inside `out`.

    plan: a plan for the same model. Only the data of one rank is in memory at a time. progress: called with the ranks
    written and the total. Raises ValueError if `source` is incomplete, the plan is for another model, or `out` already
    has a checkpoint of that step; nothing is written then.
    """
    about, mesh = folders.manifest(source), plan.inner
    folders.check(source)
    if (there := out / source.name).exists():
        raise ValueError(f"{there} already exists: choose another folder")
    stored = CheckpointReader(source)
    if foreign := {x for x in plan.inputs if kind_of(x) == Kind.PARAM} - set(about["labels"].values()):
        raise ValueError(
            f"the plan is for another model: it has a layout for {min(foreign)!r}, which is not in {source}"
        )
    layouts = {name: plan.input_layout(about["labels"][name]) for name in stored.tensors}
    for name, layout in layouts.items():
        layout.local_shape(stored.tensors[name].shape, mesh)

    def parts() -> Iterator[Copies]:
        for rank in range(devices(mesh)):
            progress(rank, devices(mesh))
            part: Copies = {}
            for number, (name, spec) in enumerate(stored.tensors.items()):
                owned = is_owner(layouts[name], mesh, rank, number)
                owned_boxes = boxes(layouts[name], spec.shape, mesh, rank) if owned else []
                part[name] = spec, {box.whole: stored.block(name, box.whole, box.sizes) for box in owned_boxes}
            yield part
        progress(devices(mesh), devices(mesh))

    final = folders.step_folder(out, about["step"])
    draft = folders.scratch(final)
    shutil.rmtree(draft, ignore_errors=True)
    try:
        from tutti.checkpoint.write import write_each  # see there

        files = write_each(draft, parts())
        for name in about["files"]:
            if name != folders.METADATA and not name.endswith(".distcp"):
                shutil.copy(folders.file_in(source, name), draft)
        return folders.commit(final, files, {**about, "plan": json.loads(plan.to_json())})
    finally:
        shutil.rmtree(draft, ignore_errors=True)
