"""C++ functions over batches of text, called through ctypes without Python's lock.

They are compiled at first use; `library_path()` in one process and `use(path)` in others of the same machine avoids
that the others wait for a compiler.
"""

from __future__ import annotations

import ctypes
import platform
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tutti.data.corpus.native.tables import code_points
from tutti.whole_files import write_text

FILES = ("text.h", "features.cpp", "lines.cpp", "hashes.cpp", "models.cpp")
_path: str | None = None


def use(path: str) -> None:
    """Load the library that another process of this machine compiled."""
    global _path
    _path = path


def library_path() -> str:
    """The compiled library. Compiles it at first use, which needs torch and a C++ compiler.

    A note in the user's cache says where the library of these sources for this processor is, so that later processes
    need not import torch.
    """
    global _path
    if _path is None:
        source = "\n".join((Path(__file__).parent / name).read_text() for name in FILES)
        note = _cache() / f"corpus-{blake2b((source + _processor()).encode(), digest_size=12).hexdigest()}"
        with suppress(OSError):
            noted = note.read_text()
            if Path(noted).is_file():
                _path = noted
                return noted
        from tutti import compat

        _path = compat.compile_cpp(source)._name
        with suppress(OSError):  # a home that cannot be written to
            write_text(note, _path)
    return _path


def _cache() -> Path:
    return Path.home() / ".cache" / "tutti" / "native"


def _processor() -> str:
    """What a library that was compiled for this processor depends on."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
    return f"{platform.platform()} {platform.processor()}"


@cache
def library() -> ctypes.CDLL:
    loaded = ctypes.CDLL(library_path())
    for name in ("hash_units", "hash_windows", "phrase_hashes", "count_n_grams"):
        getattr(loaded, name).restype = ctypes.c_int64
    loaded.feature_names.restype = ctypes.c_char_p
    classes, lower = code_points()
    loaded.set_tables(_address(classes), _address(lower), ctypes.c_uint32(len(classes)))
    return loaded


def call(name: str, *args: Any) -> Any:
    """Call a function: arrays are passed by address, Python integers as int64."""
    return getattr(library(), name)(*map(_argument, args))


def text_arguments(texts: pa.StringArray) -> tuple[int, np.ndarray, np.ndarray]:
    """The arguments (n, offsets, data) of a batch of documents without nulls."""
    if len(texts) == 0:
        return 0, np.zeros(1, np.int32), np.zeros(1, np.uint8)
    _, offsets, data = texts.buffers()
    offsets = np.frombuffer(offsets, np.int32, len(texts) + 1, offset=4 * texts.offset)
    return len(texts), offsets, np.frombuffer(data, np.uint8) if data is not None else np.zeros(1, np.uint8)


def text_array(offsets: np.ndarray, data: np.ndarray) -> pa.StringArray:
    """Documents from offsets (n + 1,) int32 and the bytes of valid UTF-8 that a function wrote."""
    return pa.StringArray.from_buffers(
        len(offsets) - 1, pa.py_buffer(offsets), pa.py_buffer(data[: offsets[-1]].tobytes())
    )


def _address(array: np.ndarray) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def _argument(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _address(value)
    if isinstance(value, bool):
        return ctypes.c_bool(value)
    if isinstance(value, int):
        return ctypes.c_int64(value)
    if isinstance(value, float):
        return ctypes.c_double(value)
    return value  # bytes, None, ctypes
