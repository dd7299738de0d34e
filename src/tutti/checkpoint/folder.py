"""Checkpoint folders, which are either complete or absent.

A checkpoint is a folder, such as `step-00000200`, with files and a `manifest.json`, which is written last. The manifest
has the version of its format, the size and checksum of each file, facts about the run, and its own checksum. The folder
is written under another name, flushed to disk, and renamed, so a crash, a kill or a full disk leaves earlier
checkpoints intact.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from tutti.checkpoint import unpickle
from tutti.whole_files import to_disk

CHECKPOINTS = "checkpoints"  # subfolder of a run
TRAINER_STATE = "state"  # subfolder of a checkpoint of a Trainer: the checkpoint of its step
TRAINER_JSON = "trainer_state.json"  # a file of a checkpoint of a Trainer
MANIFEST = "manifest.json"
METADATA = ".metadata"  # index file of torch.distributed.checkpoint
WRITING, REPLACED = ".writing-", ".replaced-"  # prefixes of folders that are not complete, or no longer
FORMAT = 1  # of manifests

Files = dict[str, dict[str, int | str]]  # by name: bytes and sha256


def step_folder(root: Path, step: int) -> Path:
    """The folder of the checkpoint after `step` completed steps."""
    return root / f"step-{step:08d}"


def scratch(final: Path) -> Path:
    """The folder in which a checkpoint is written that will be the folder `final`."""
    return final.with_name(WRITING + final.name)


def commit(final: Path, files: Files, facts: Mapping[str, Any]) -> Path:
    """Turn the scratch folder of a checkpoint into the checkpoint, and return its folder.

    files: those that are described and flushed to disk already; this describes and flushes the others. facts: entries
    of the manifest, "step" among them. Replaces a checkpoint that is in the place, such as a damaged one.
    """
    draft, replaced = scratch(final), final.with_name(REPLACED + final.name)
    files = dict(files)
    for path in sorted(draft.rglob("*")):
        if (name := path.relative_to(draft).as_posix()) not in {*files, MANIFEST} and path.is_file():
            to_disk(path)
            files[name] = describe(path)
    (draft / MANIFEST).write_text(json.dumps(sealed({"format": FORMAT, **facts, "files": files}), indent=1))
    to_disk(draft / MANIFEST)
    for folder in {draft, *((draft / name).parent for name in files)}:
        to_disk(folder)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    draft.rename(final)
    to_disk(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def sealed(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a manifest with their checksum."""
    facts = {name: fact for name, fact in facts.items() if name != "checksum"}
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return {**facts, "checksum": hashlib.sha256(text.encode()).hexdigest()}


def clear(root: Path) -> None:
    """Delete unfinished checkpoints, and those that were replaced. One that `commit` has moved away, but not replaced,
    is put back. Not for a folder that another process writes checkpoints to."""
    for replaced in root.glob(f"{REPLACED}*"):
        final = replaced.with_name(replaced.name.removeprefix(REPLACED))
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(final)
    for unfinished in root.glob(f"{WRITING}*"):
        shutil.rmtree(unfinished, ignore_errors=True)


def prune(root: Path, step: int, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints of at most `step` steps. Later ones do not
    count: they may be damaged."""
    for old in [x for x in folders(root) if step_of(x) <= step][keep:]:
        shutil.rmtree(old, ignore_errors=True)


def step_of(folder: Path) -> int:
    """The number of completed steps, from the folder's name."""
    return int(folder.name.removeprefix("step-"))


def unfinished(root: Path) -> int | None:
    """The step of an unfinished checkpoint, or None."""
    left_over = sorted(root.glob(f"{WRITING}step-*"))
    return int(left_over[-1].name.rpartition("-")[2]) if left_over else None


def folders(root: Path) -> list[Path]:
    """Checkpoint folders, newest first, complete or not."""
    return sorted((p for p in root.glob("step-*") if p.name[5:].isdecimal() and p.is_dir()), reverse=True)


def trainer_checkpoints(output_dir: str | Path) -> list[Path]:
    """The folders checkpoint-N of a Trainer, oldest first."""
    numbered = [x for x in Path(output_dir).glob("checkpoint-*") if x.name.partition("-")[2].isdecimal()]
    return sorted(numbered, key=lambda x: int(x.name.partition("-")[2]))


def is_step_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint of a step. One of a Trainer has a manifest too, but a model in safetensors."""
    return (folder / MANIFEST).exists() and not (folder / TRAINER_JSON).exists()


def latest(root: Path, say: Callable[[str], None] = lambda said: None) -> Path | None:
    """The newest complete checkpoint, or None. `say` reports the newer ones that are skipped."""
    if (step := unfinished(root)) is not None:
        say(f"the checkpoint of step {step} was not finished: skipped")
    for folder in folders(root):
        fault = find_fault(folder)
        if fault is None:
            return folder
        say(f"checkpoint {folder} is not complete: {fault}: skipped")
    return None


def manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises ValueError if the folder is not a complete checkpoint."""
    try:
        about = json.loads(file_in(folder, MANIFEST).read_text())
        if type(about["format"]) is int and about["format"] > FORMAT:
            raise Later(f"a later version wrote it, in format {about['format']}; this one reads format {FORMAT}")
        if about != sealed(about) or type(about["step"]) is not int:
            raise KeyError
        if not all(type(entry["bytes"]) is int for entry in about["files"].values()):
            raise KeyError
        for name in about["files"]:
            file_in(folder, name)
    except (Outside, Later) as error:
        raise ValueError(f"{folder} is no checkpoint: {error}") from None
    except (FileNotFoundError, NotADirectoryError):
        hint = f"; it holds some: name one, as {inside[0]}" if (inside := folders(folder)) else ""
        raise ValueError(f"{folder} is no checkpoint: it has no {MANIFEST}{hint}") from None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ValueError(f"{folder} is no checkpoint: its {MANIFEST} is damaged") from None
    except OSError as error:
        raise ValueError(f"{folder} is no checkpoint: its {MANIFEST} cannot be read: {error.strerror}") from None
    return about


def check(folder: Path, part: int = 0, parts: int = 1) -> None:
    """Raise ValueError if `find_fault` finds a fault."""
    if fault := find_fault(folder, part, parts):
        raise ValueError(f"checkpoint {folder} is not complete: {fault}")


def find_fault(folder: Path, part: int = 0, parts: int = 1) -> str | None:
    """Describe the first fault of a checkpoint; None if every file matches the manifest.

    Checks existence and size of all files, and checksums of every `parts`-th file, from `part` on (of none if `parts`
    is 0).
    """
    try:
        files: Files = manifest(folder)["files"]
    except ValueError as error:
        return str(error).partition(": ")[2]
    try:
        for i, (name, entry) in enumerate(sorted(files.items())):
            path, read = folder / name, parts > 0 and i % parts == part
            if fault := fault_of(path, entry, read):
                return f"{name} {fault}"
            if read and name == METADATA:
                for place in unpickle.metadata(path.read_bytes()).storage_data.values():
                    file_in(folder, place.relative_path)
    except (ValueError, AttributeError, TypeError) as error:
        return str(error)
    return None


class Later(ValueError):
    """A manifest of a later version."""


class Outside(ValueError):
    """A file name in a checkpoint that points outside its folder."""


def file_in(folder: Path, name: str) -> Path:
    """The path of a file in a checkpoint, whether or not it exists. Opens nothing.

    Raises Outside for an absolute name, a name with `..`, a symbolic link out of the folder, a pipe or a device.
    """
    path, pure = folder / name, PurePosixPath(name)
    if not name or "\0" in name or "\\" in name or pure.is_absolute() or ".." in pure.parts or pure == PurePosixPath():
        raise Outside(f"refused: the file name {name!r} points outside the folder")
    if not path.resolve().is_relative_to(folder.resolve()):
        raise Outside(f"refused: {name} is a symbolic link out of the folder")
    if path.exists() and not (path.is_file() or path.is_dir()):  # opening a pipe would block
        raise Outside(f"refused: {name} is not a regular file")
    return path


def fault_of(path: Path, entry: dict[str, int | str], read: bool = True) -> str | None:
    """Describe the fault of a file; None if it matches its manifest entry. Checks only the size unless `read`."""
    try:
        if not path.exists():
            return "is missing"
        if (count := path.stat().st_size) != entry["bytes"]:
            return f"has {count} bytes instead of {entry['bytes']}"
        return "has changed since it was written" if read and describe(path) != entry else None
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def describe(path: Path) -> dict[str, int | str]:
    """Size and checksum of a file, as a manifest entry."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


@contextmanager
def os_errors() -> Iterator[None]:
    """Raise errors of the file system that libraries in Rust report, by their text, as OSErrors."""
    try:
        yield
    except Exception as error:
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            code = int(number[1])
            raise OSError(code, os.strerror(code)) from error
        raise
