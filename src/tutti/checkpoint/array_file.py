"""Files .npz, for the exchange of arrays with programs that use NumPy. What tutti alone reads is in `tensor_file`."""

from __future__ import annotations

import lzma
import math
import os
import zipfile
import zlib
from pathlib import Path
from tokenize import TokenError

import numpy as np

from tutti.whole_files import whole_file

HEADER = (ValueError, TypeError, IndexError, KeyError, OverflowError, MemoryError, RecursionError, SyntaxError,
          TokenError)  # what numpy raises for a damaged header  # fmt: skip
DENSEST = 1032  # bytes of content to a byte of a deflated file, at most


def write_arrays(path: str | Path, **arrays: object) -> None:
    """Write arrays. The file that was there stays until the new one is complete."""
    with whole_file(Path(path)) as draft, draft.open("wb") as file:
        np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]


def read_arrays(path: str | Path, *names: str) -> dict[str, np.ndarray]:
    """Arrays of a file, without running code and without allocating more than its content.

    Raises ValueError, naming the file, if it is damaged, holds objects, or lacks one of the arrays.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            if missing := [name for name in names if name not in members]:
                raise ValueError(f"{path} has no array {missing[0]}; it has {', '.join(members) or 'none'}")
            return {name: _array(path, archive, members[name]) for name in names}
    except FileNotFoundError:
        raise
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError, OSError):
        raise ValueError(f"{path} is no .npz file of arrays, or is damaged: write it with numpy.savez") from None


def _array(path: str | Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    try:
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError("a compression that numpy does not write")
        with archive.open(info) as member:
            version = np.lib.format.read_magic(member)
            header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = header(member)
            size = math.prod(shape) * dtype.itemsize
            if dtype.hasobject:
                raise ValueError("objects, and reading them could run code")
            if size != info.file_size - member.tell() or size > DENSEST * os.path.getsize(path):
                raise ValueError(f"an array of {size} bytes in {info.file_size}")
        with archive.open(info) as member:
            return np.lib.format.read_array(member, allow_pickle=False)
    except HEADER as error:
        raise ValueError(f"{path} is no .npz file of arrays of numbers: {info.filename} holds {error}") from None
