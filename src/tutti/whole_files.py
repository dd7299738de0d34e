"""Files and folders that are complete or absent.

They are written under another name and renamed: a reader, a process that is killed and a full disk find or leave the
old content or the new one. What killed processes have left is deleted when another one writes into the folder.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

UNFINISHED = ".unfinished"  # the end of the name of what is being written
DRAFT = re.compile(rf"\..*\.(\w+)-(\d+)-\w+{re.escape(UNFINISHED)}")  # its machine and process
OLD = 7 * 24 * 3600.0  # seconds after which a draft of another machine is taken for one of a killed process
SWEPT: set[Path] = set()  # folders in which this process has looked for such drafts


@contextmanager
def whole_file(path: Path, durable: bool = False) -> Iterator[Path]:
    """Yield a path to write to. It replaces `path` when the block ends, and is deleted if the block raises.

    Creates missing folders. durable: wait until the file is on disk, so that it survives a crash of the machine.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = _draft_of(path)
    try:
        yield draft
        if durable:
            to_disk(draft)
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
    if durable:
        with suppress(OSError):  # some file systems cannot do it for folders
            to_disk(path.parent)


def write_text(path: Path, text: str, durable: bool = False) -> None:
    """Write a file in UTF-8. durable: as for `whole_file`. Raises OSError, naming the file, if it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with whole_file(path, durable) as draft:
            draft.write_text(text, "utf-8")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder to write to. It replaces `path`, or the folder that this links to, when the block ends, and
    is deleted if the block raises."""
    path = path.resolve()
    draft = _draft_of(path)
    draft.mkdir(parents=True)
    try:
        yield draft
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    replace_folder(draft, path)


def replace_folder(draft: Path, path: Path) -> None:
    """Rename a folder to `path`, and delete the folder that was there. A kill between the two leaves both."""
    replaced = path.with_name(f".{path.name}.replaced")
    if path.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        path.rename(replaced)
    draft.rename(path)
    shutil.rmtree(replaced, ignore_errors=True)


def to_disk(path: Path) -> None:
    """Wait until a file or a folder is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _draft_of(path: Path) -> Path:
    """A name that no other process and no other call has."""
    if path.parent not in SWEPT:
        SWEPT.add(path.parent)
        _sweep(path.parent)
    return path.with_name(f".{path.name}.{_machine()}-{os.getpid()}-{secrets.token_hex(4)}{UNFINISHED}")


def _sweep(folder: Path) -> None:
    """Delete drafts of killed processes."""
    for draft in folder.glob(f".*{UNFINISHED}"):
        with suppress(OSError):
            if (match := DRAFT.fullmatch(draft.name)) is None:
                continue
            is_killed = match[1] == _machine() and not _is_alive(int(match[2]))
            if is_killed or time.time() - draft.stat().st_mtime > OLD:
                shutil.rmtree(draft) if draft.is_dir() else draft.unlink()


@functools.cache
def _machine() -> str:
    """An identity that processes share which see each other's numbers: of one boot, and outside or in one container."""
    try:
        identity = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        identity = platform.node()
    return hashlib.blake2b(identity.encode(), digest_size=4).hexdigest()


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True
