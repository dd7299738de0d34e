"""Folders of checkpoints that are either complete or not there.

A checkpoint is a folder `step-00000200`: files, and `manifest.json` with the size and checksum of each and facts about
the run. It is written under another name, brought to the disk, and renamed, so that a crash, a kill or a full disk at
any moment leaves the checkpoints before it as they were.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from tutti.checkpoint import unpickle

CHECKPOINTS = "checkpoints"  # in the folder of a run
MANIFEST = "manifest.json"
METADATA = ".metadata"  # of torch.distributed.checkpoint
WRITING = ".writing-"

Files = dict[str, dict[str, int | str]]  # by name: bytes and sha256


def scratch(root: Path, step: int) -> Path:
    """Where the checkpoint of so many completed steps is written."""
    return root / f"{WRITING}{step:08d}"


def commit(root: Path, step: int, files: Files, facts: Mapping[str, Any]) -> Path:
    """Make what was written a checkpoint; its folder. The files are on the disk already."""
    made, final = scratch(root, step), root / f"step-{step:08d}"
    (made / MANIFEST).write_text(json.dumps({"step": step, **facts, "files": files}, indent=1))
    to_disk(made / MANIFEST)
    to_disk(made)
    if final.exists():  # a broken one of the same step
        shutil.rmtree(final)
    made.rename(final)
    to_disk(root)
    return final


def clear(root: Path) -> None:
    """Drop what was never finished."""
    for left_over in root.glob(f"{WRITING}*"):
        shutil.rmtree(left_over, ignore_errors=True)


def prune(root: Path, step: int, keep: int) -> None:
    """Drop all but some of the newest of so many completed steps or fewer; later ones may be damaged."""
    for old in [x for x in folders(root) if step_of(x) <= step][keep:]:
        shutil.rmtree(old, ignore_errors=True)


def step_of(folder: Path) -> int:
    """How many steps a checkpoint had completed, by its name."""
    return int(folder.name.removeprefix("step-"))


def unfinished(root: Path) -> int | None:
    """The step of a checkpoint that was begun and never finished."""
    left_over = sorted(root.glob(f"{WRITING}*"))
    return int(left_over[-1].name.removeprefix(WRITING)) if left_over else None


def folders(root: Path) -> list[Path]:
    """Newest first."""
    return sorted((p for p in root.glob("step-*") if p.name[5:].isdecimal() and p.is_dir()), reverse=True)


def latest(root: Path, say: Callable[[str], None] = lambda said: None) -> Path | None:
    """The newest complete checkpoint, or None; `say` is told of newer ones that are skipped."""
    if (step := unfinished(root)) is not None:
        say(f"the checkpoint of step {step} was not finished: skipped")
    for folder in folders(root):
        fault = find_fault(folder)
        if fault is None:
            return folder
        say(f"checkpoint {folder} is not complete: {fault}: skipped")
    return None


def manifest(folder: Path) -> dict[str, Any]:
    """What was written about a checkpoint. Raises ValueError where it is no complete one."""
    try:
        found = json.loads(file_in(folder, MANIFEST).read_text())
        if type(found["step"]) is not int or not all(type(told["bytes"]) is int for told in found["files"].values()):
            raise KeyError
        for name in found["files"]:
            file_in(folder, name)
    except Outside as error:
        raise ValueError(f"{folder} is no checkpoint: {error}") from None
    except (FileNotFoundError, NotADirectoryError):
        hint = f"; it holds some: name one, as {inside[0]}" if (inside := folders(folder)) else ""
        raise ValueError(f"{folder} is no checkpoint: it has no {MANIFEST}{hint}") from None
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ValueError(f"{folder} is no checkpoint: its {MANIFEST} is damaged") from None
    except OSError as error:
        raise ValueError(f"{folder} is no checkpoint: its {MANIFEST} cannot be read: {error.strerror}") from None
    return found


def check(folder: Path, part: int = 0, parts: int = 1) -> None:
    """ValueError where `find_fault` finds one."""
    if fault := find_fault(folder, part, parts):
        raise ValueError(f"checkpoint {folder} is not complete: {fault}")


def find_fault(folder: Path, part: int = 0, parts: int = 1) -> str | None:
    """What is wrong with a checkpoint, or None when every file is as it was written.

    part, of so many parts: which of the files are looked into; of all it is seen whether they are there, with the
    size that they had. With no parts none is looked into.
    """
    try:
        files: Files = manifest(folder)["files"]
    except ValueError as error:
        return str(error).partition(": ")[2]
    try:
        for i, (name, told) in enumerate(sorted(files.items())):
            path, read = folder / name, parts > 0 and i % parts == part
            if fault := fault_of(path, told, read):
                return f"{name} {fault}"
            if read and name == METADATA:
                for place in unpickle.metadata(path.read_bytes()).storage_data.values():
                    file_in(folder, place.relative_path)
    except (ValueError, AttributeError, TypeError) as error:
        return str(error)
    return None


class Outside(ValueError):
    """A name in a checkpoint that leads out of its folder."""


def file_in(folder: Path, name: str) -> Path:
    """The file of this name in a checkpoint, which may not be there. Nothing is opened.

    Raises Outside for an absolute name, one with `..`, a symbolic link out of the folder, a pipe and a device.
    """
    path, pure = folder / name, PurePosixPath(name)
    if not name or "\0" in name or "\\" in name or pure.is_absolute() or ".." in pure.parts or pure == PurePosixPath():
        raise Outside(f"the file name {name!r} leads out of the folder: refused")
    if not path.resolve().is_relative_to(folder.resolve()):
        raise Outside(f"{name} is a symbolic link out of the folder: refused")
    if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe would be waited for
        raise Outside(f"{name} is no regular file: refused")
    return path


def fault_of(path: Path, told: dict[str, int | str], read: bool = True) -> str | None:
    """What is wrong with a file, or None when it is as the manifest says: by its size alone where it is not `read`."""
    try:
        if not path.exists():
            return "is missing"
        if (count := path.stat().st_size) != told["bytes"]:
            return f"has {count} bytes instead of {told['bytes']}"
        return "has changed since it was written" if read and describe(path) != told else None
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def describe(path: Path) -> dict[str, int | str]:
    """Size and checksum of a file, as in a manifest."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
