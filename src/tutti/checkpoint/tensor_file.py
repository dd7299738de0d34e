"""One file of tensors in the format of safetensors, which is complete or absent and has a checksum of its content.

The file is written under another name, flushed to disk, and renamed, so a crash, a kill or a full disk leaves the file
that was there before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, uint8

from tutti.checkpoint.folder import to_disk

CHECKSUM = "sha256"  # a key of the metadata
UNFINISHED = ".unfinished"  # the end of the name of a file that is being written


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors, and texts as metadata. Raises OSError if the disk is full."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    contiguous = {name: x.contiguous() for name, x in tensors.items()}
    metadata = dict(metadata or {})
    unfinished = path.with_name(path.name + UNFINISHED)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        save_file(contiguous, unfinished, {**metadata, CHECKSUM: _checksum(contiguous, metadata)})
        to_disk(unfinished)
        unfinished.replace(path)
        to_disk(path.parent)
    except (OSError, SafetensorError) as error:
        unfinished.unlink(missing_ok=True)
        raise OSError(f"could not save {path}: {getattr(error, 'strerror', None) or error}") from error


def read_metadata(path: Path) -> dict[str, str]:
    """The texts of a file, which `read_tensors` verifies. Raises ValueError, naming the file, if it is damaged."""
    with _opened(path) as file:
        metadata = file.metadata() or {}
    return {name: text for name, text in metadata.items() if name != CHECKSUM}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file. Raises ValueError, naming the file, if it is damaged or was changed."""
    with _opened(path) as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if metadata.pop(CHECKSUM, None) != _checksum(tensors, metadata):
        raise ValueError(f"{path} is damaged: its content has changed since it was written")
    return tensors


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """An open file. Errors meanwhile are ValueErrors that name it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from None


def _checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    for name, text in sorted(metadata.items()):
        digest.update(f"{name}={text}\0".encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name}:{x.dtype}{tuple(x.shape)}\0".encode())
        digest.update(x.detach().cpu().reshape(-1).view(uint8).numpy().data)
    return digest.hexdigest()
