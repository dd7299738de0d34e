"""Checkpoints that are either complete or not there.

A checkpoint is a folder `step-00000200`: what `fill` writes into it, and `manifest.json` with the size and
checksum of every file. It is written under another name, brought to the disk file by file, and renamed, so
that a crash, a kill or a full disk at any moment leaves the checkpoints before it as they were.
"""

import json
import os
import shutil
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from safetensors import SafetensorError

MANIFEST = "manifest.json"
_SCRATCH = ".writing-"


class SaveError(OSError):
    """A checkpoint could not be written; the ones before it are intact."""


def save(root: Path, step: int, fill: Callable[[Path], None], keep: int) -> Path:
    """Write the checkpoint of `step` completed steps, then delete all but the newest `keep`; returns its
    folder.

    `fill(folder)` writes the files. When it or the disk fails, SaveError says why, and nothing else has
    changed.
    """
    final, scratch = root / f"step-{step:08d}", root / f"{_SCRATCH}{step:08d}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for left_over in root.glob(f"{_SCRATCH}*"):
            shutil.rmtree(left_over)
        scratch.mkdir()
        fill(scratch)
        files = {p.name: _describe(p) for p in sorted(scratch.iterdir())}
        for name in files:
            _to_disk(scratch / name)
        (scratch / MANIFEST).write_text(json.dumps({"step": step, "files": files}, indent=1))
        _to_disk(scratch / MANIFEST)
        _to_disk(scratch)
        if final.exists():  # a broken one of the same step
            shutil.rmtree(final)
        scratch.rename(final)
        _to_disk(root)
    except (OSError, SafetensorError) as e:
        shutil.rmtree(scratch, ignore_errors=True)
        why = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
        before = latest(root, say=lambda _: None)
        still = f"{before} is intact" if before else "there is no checkpoint before it"
        raise SaveError(f"could not save the checkpoint of step {step} in {root}: {why}; {still}") from e
    for old in _folders(root)[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def latest(root: Path, say: Callable[[str], None]) -> Path | None:
    """The newest complete checkpoint, or None; `say` is told of newer ones that are skipped."""
    if left_over := sorted(root.glob(f"{_SCRATCH}*")):
        step = int(left_over[-1].name.removeprefix(_SCRATCH))
        say(f"the checkpoint of step {step} was not finished: skipped")
    for folder in _folders(root):
        fault = find_fault(folder)
        if fault is None:
            return folder
        say(f"checkpoint {folder} is not complete: {fault}: skipped")
    return None


def find_fault(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None when every file is as it was written."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (ValueError, KeyError):
        return f"its {MANIFEST} is damaged"
    for name, told in files.items():
        path = folder / name
        if not path.exists():
            return f"{name} is missing"
        if path.stat().st_size != told["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {told['bytes']}"
        if _describe(path) != told:
            return f"{name} has changed since it was written"
    return None


def step_of(folder: Path) -> int:
    """How many steps had been completed."""
    return int(json.loads((folder / MANIFEST).read_text())["step"])


def _folders(root: Path) -> list[Path]:
    """Newest first."""
    return sorted((p for p in root.glob("step-*") if p.is_dir()), reverse=True)


def _describe(path: Path) -> dict[str, int | str]:
    digest = blake2b(digest_size=16)
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return {"bytes": path.stat().st_size, "blake2b": digest.hexdigest()}


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
