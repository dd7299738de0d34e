"""One file of tensors in the format of safetensors, which is complete or absent and has a checksum of its content.

The file is written under another name, flushed to disk, and renamed, so a crash, a kill or a full disk leaves the file
that was there before. Reading runs no code, and allocates no more than the file holds.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, uint8

from tutti.checkpoint.folder import os_errors
from tutti.weight_files import opened
from tutti.whole_files import to_disk, whole_file

CHECKSUM = "sha256"  # a key of the metadata


def write_tensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None, previous: Path | None = None
) -> None:
    """Write tensors, and texts as metadata. previous: where the file that is replaced remains.

    Raises OSError, naming the file, if it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    contiguous, metadata = _apart(tensors), dict(metadata or {})
    try:
        with whole_file(path, durable=True) as draft:
            with os_errors():
                save_file(contiguous, draft, {**metadata, CHECKSUM: _checksum(contiguous, metadata)})
            if previous is not None and path.exists():
                to_disk(draft)
                _second_name(path, previous)
    except (OSError, SafetensorError) as error:
        raise OSError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from error


def read_metadata(path: Path) -> dict[str, str]:
    """The texts of a file, which `read_tensors` verifies. Raises ValueError as `tutti.weight_files.opened`."""
    with opened(path) as file:
        metadata = file.metadata() or {}
    return {name: text for name, text in metadata.items() if name != CHECKSUM}


def read_tensors(path: Path, unsigned: bool = False) -> dict[str, Tensor]:
    """The tensors of a file. Raises ValueError, naming the file, if it is damaged or was changed.

    unsigned: also of a file without a checksum, which other programs and earlier versions wrote.
    """
    from safetensors import SafetensorError

    try:
        with opened(path) as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, RuntimeError, TypeError, AttributeError) as error:  # such as a dtype torch lacks
        raise ValueError(f"{path} cannot be read: {error}") from error
    checksum = metadata.pop(CHECKSUM, None)
    if (checksum is not None or not unsigned) and checksum != _checksum(tensors, metadata):
        raise ValueError(f"{path} is damaged: its content has changed since it was written")
    return tensors


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors that share no memory, which save_file refuses."""
    apart: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, x in tensors.items():
        x = x.detach().contiguous()
        storage = x.untyped_storage().data_ptr()
        apart[name] = x.clone() if storage in storages else x
        storages.add(storage)
    return apart


def _second_name(path: Path, previous: Path) -> None:
    previous.unlink(missing_ok=True)
    try:
        os.link(path, previous)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, previous)


def _checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    for name, text in sorted(metadata.items()):
        digest.update(f"{name}={text}\0".encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name}:{x.dtype}{tuple(x.shape)}\0".encode())
        flat = x.cpu().as_strided((x.numel(),), (1,))  # a dim of size 1 may have any stride, which view refuses
        digest.update(flat.view(uint8).numpy().data)
    return digest.hexdigest()
