"""Files and folders that are complete or absent.

They are written under another name and renamed: a reader, a process that is killed and a full disk find or leave the
old content or the new one.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

UNFINISHED = ".unfinished"  # the end of the name of a file that is being written


@contextmanager
def whole_file(path: Path, durable: bool = False) -> Iterator[Path]:
    """Yield a path to write to. It replaces `path` when the block ends, and is deleted if the block raises.

    Creates missing folders. durable: wait until the file is on disk, so that it survives a crash of the machine.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
        yield draft
        if durable:
            to_disk(draft)
        draft.replace(path)
        if durable:
            to_disk(path.parent)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def write_text(path: Path, text: str, durable: bool = False) -> None:
    """Write a file in UTF-8. durable: as for `whole_file`. Raises OSError, naming the file, if it cannot be written."""
    try:
        with whole_file(path, durable) as draft:
            draft.write_text(text, "utf-8")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder to write to. It replaces `path` when the block ends, and is deleted if the block raises."""
    draft = path.with_name(f".{path.name}{UNFINISHED}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        yield draft
        shutil.rmtree(path, ignore_errors=True)
        draft.rename(path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def to_disk(path: Path) -> None:
    """Wait until a file or a folder is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
