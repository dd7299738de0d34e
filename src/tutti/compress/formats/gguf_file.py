"""The container of GGUF version 3: metadata and named tensors in one file.

A file is, little-endian:

    magic "GGUF", version u32, number of tensors u64, number of metadata entries u64
    metadata: key string, type u32, value
    tensors: name string, number of dims u32, sizes u64 (the fastest first), type u32, offset u64
    padding to the alignment, then the tensors, each at its offset from here

A string is its length in bytes as u64 and UTF-8. Source: docs/gguf.md of ggml-org/ggml.

`read` trusts no number of the file: each count is compared with the bytes that are left before anything of that size
is allocated, and the tensors are memory-mapped.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tutti.compress.formats.gguf_blocks import TYPES, BlockType
from tutti.whole_files import whole_file

MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
_NUMBERS = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "?", 10: "u8", 11: "i8", 12: "f8"}
_FLOAT32, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
_MOST_DIMS = 4


@dataclass(frozen=True)
class Stored:
    """A tensor of a file. shape: the slowest dim first, as in PyTorch. data: its bytes (rows, bytes of a row)."""

    type: BlockType
    shape: tuple[int, ...]
    data: np.ndarray

    def numbers(self) -> np.ndarray:
        """The tensor in float32."""
        return self.type.decode(self.data).reshape(self.shape)


@dataclass(frozen=True)
class File:
    """The content of a file."""

    metadata: dict[str, Any]
    tensors: dict[str, Stored] = field(repr=False)


@dataclass(frozen=True)
class Written:
    """A tensor to write. rows: makes its bytes (rows, bytes of a row) when they are written."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    rows: Callable[[], np.ndarray]

    @property
    def bytes(self) -> int:
        return self.type.bytes_of(self.shape)


# ---- writing --------------------------------------------------------------------------------------------------------


def write(path: Path, metadata: Mapping[str, Any], tensors: Iterable[Written]) -> None:
    """Write a file, which is complete or absent. One tensor at a time is in memory.

    metadata: values are str, bool, int (u32, or i64 if it does not fit), float (f32), or a list of one of these, or a
    NumPy array. Raises OSError if the disk is full.
    """
    tensors = list(tensors)
    with whole_file(path, durable=True) as draft, open(draft, "wb") as file:
        _write_head(file, metadata, tensors)
        for x in tensors:
            rows = np.ascontiguousarray(x.rows())
            if rows.nbytes != x.bytes:
                raise AssertionError(f"{x.name} has {rows.nbytes} bytes, expected {x.bytes}")
            file.write(rows.data)
            file.write(b"\0" * (-rows.nbytes % ALIGNMENT))


def _write_head(file: BinaryIO, metadata: Mapping[str, Any], tensors: list[Written]) -> None:
    file.write(MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(metadata)))
    for key, value in metadata.items():
        file.write(_string(key) + _value(key, value))
    offset = 0
    for x in tensors:
        sizes = x.shape[::-1]
        file.write(_string(x.name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, x.type.number, offset))
        offset += x.bytes + -x.bytes % ALIGNMENT
    file.write(b"\0" * (-file.tell() % ALIGNMENT))


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(key: str, value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, list) and value and isinstance(value[0], str):
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_string, value))
    array = np.asarray(value)
    if not isinstance(value, np.ndarray):
        array = _narrow(array)
    kinds = {np.dtype(name): number for number, name in _NUMBERS.items()}
    if array.dtype not in kinds or array.ndim > 1:
        raise ValueError(f"GGUF cannot store {key} = {value!r}")
    kind, data = kinds[array.dtype], array.astype(array.dtype.newbyteorder("<")).tobytes()
    return (struct.pack("<IIQ", _ARRAY, kind, len(array)) if array.ndim else struct.pack("<I", kind)) + data


def _narrow(array: np.ndarray) -> np.ndarray:
    """Python's numbers in the types that llama.cpp expects."""
    if array.dtype.kind == "f":
        return array.astype(np.float32)
    if array.dtype.kind == "i" and array.size and array.min() >= 0 and array.max() < 2**32:
        return array.astype(np.uint32)
    return array


# ---- reading --------------------------------------------------------------------------------------------------------


class _Reader:
    """A cursor over the bytes of a file."""

    def __init__(self, data: np.ndarray):
        self.data, self.at = data, 0

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def take(self, count: int, what: str) -> np.ndarray:
        if count > self.left:
            raise ValueError(f"{what} needs {count} bytes at {self.at}, of which the file has {self.left}")
        self.at += count
        return self.data[self.at - count : self.at]

    def unpack(self, kind: str, what: str) -> Any:
        (value,) = struct.unpack(f"<{kind}", self.take(struct.calcsize(kind), what).tobytes())
        return value

    def count(self, least: int, what: str) -> int:
        """A number of things, each of at least so many bytes."""
        number = self.unpack("Q", what)
        if number * least > self.left:
            raise ValueError(f"{what} is {number}, which cannot be in the {self.left} bytes that follow")
        return number

    def string(self, what: str) -> str:
        data = self.take(self.count(1, f"the length of {what}"), what).tobytes()
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{what} is not UTF-8: {error.reason} in {data[:40]!r}") from None

    def numbers(self, kind: int, count: int, what: str) -> np.ndarray:
        dtype = np.dtype("u1" if kind == _BOOL else "<" + _NUMBERS[kind])
        values = np.frombuffer(self.take(count * dtype.itemsize, what).tobytes(), dtype)
        return values.astype(bool) if kind == _BOOL else values

    def value(self, key: str) -> Any:
        kind = self.unpack("I", f"the type of {key}")
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY:
            kind = self.unpack("I", f"the type of {key}")
            least = 8 if kind == _STRING else np.dtype(_NUMBERS.get(kind, "u1")).itemsize
            count = self.count(least, f"the length of {key}")
            if kind == _STRING:
                return [self.string(key) for _ in range(count)]
            if kind in _NUMBERS:
                return self.numbers(kind, count, key)
        elif kind in _NUMBERS:
            number = self.numbers(kind, 1, key)[0]
            return float(str(number)) if kind == _FLOAT32 else number.item()  # 1e-05, not 9.999999747378752e-06
        raise ValueError(f"{key} has type {kind}, which is not one of GGUF, or an array of arrays")


def read(path: Path) -> File:
    """The content of a file; its tensors are memory-mapped.

    Raises ValueError, naming the file and what is wrong, for a file that is not GGUF, is damaged, or has tensors of
    types that `gguf_blocks` does not know.
    """
    try:
        size = path.stat().st_size
        data = np.memmap(path, np.uint8, "r") if size else np.zeros(0, np.uint8)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        return _read(_Reader(data))
    except ValueError as error:
        raise ValueError(f"{path} is not a valid GGUF file: {error}") from None


def _read(reader: _Reader) -> File:
    if (magic := reader.take(4, "the magic number").tobytes()) != MAGIC:
        raise ValueError(f"it begins with {magic!r} instead of {MAGIC!r}")
    if (version := reader.unpack("I", "the version")) not in (2, 3):
        raise ValueError(f"it has version {version}; versions 2 and 3 of little-endian machines can be read")
    count, entries = reader.unpack("Q", "the number of tensors"), reader.unpack("Q", "the number of entries")
    for what, number, least in ("tensors", count, 32), ("metadata entries", entries, 13):
        if number * least > reader.left:
            raise ValueError(f"{number} {what} cannot be in the {reader.left} bytes that follow")
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = reader.string("a key")
        if key in metadata:
            raise ValueError(f"it has {key} twice")
        metadata[key] = reader.value(key)
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {alignment!r}; expected a power of 2 of at least 8")
    infos = [_info(reader) for _ in range(count)]
    start = reader.at + -reader.at % alignment
    return File(metadata, _tensors(infos, reader.data[start:], alignment))


def _info(reader: _Reader) -> tuple[str, BlockType, tuple[int, ...], int]:
    name = reader.string("the name of a tensor")
    dims = reader.unpack("I", f"the number of dims of {name}")
    if not 1 <= dims <= _MOST_DIMS:
        raise ValueError(f"{name} has {dims} dims; expected 1 to {_MOST_DIMS}")
    sizes = tuple(reader.unpack("Q", f"the sizes of {name}") for _ in range(dims))
    number, offset = reader.unpack("I", f"the type of {name}"), reader.unpack("Q", f"the offset of {name}")
    block_type = TYPES.get(number)
    if block_type is None:
        names = ", ".join(x.name for x in TYPES.values())
        raise ValueError(f"{name} has type {number}, which is not known; known are {names}")
    if not all(sizes):
        raise ValueError(f"{name} has a size of 0: {sizes[::-1]}")
    if sizes[0] % block_type.block:
        raise ValueError(
            f"{name} has rows of {sizes[0]}, which {block_type.name} cannot hold: it has blocks of {block_type.block}"
        )
    return name, block_type, sizes[::-1], offset


def _tensors(infos: list[tuple], data: np.ndarray, alignment: int) -> dict[str, Stored]:
    tensors: dict[str, Stored] = {}
    end, before = 0, ""
    for name, kind, shape, offset in sorted(infos, key=lambda info: info[3]):
        size = kind.bytes_of(shape)
        if name in tensors:
            raise ValueError(f"it has the tensor {name} twice")
        if offset % alignment:
            raise ValueError(f"{name} is at {offset}, which is not a multiple of the alignment {alignment}")
        if offset < end:
            raise ValueError(f"{name} at {offset} overlaps {before}, which ends at {end}")
        if offset + size > len(data):
            raise ValueError(f"{name} needs {size} bytes at {offset}, and the tensors have {len(data)}")
        rows = data[offset : offset + size].reshape(math.prod(shape[:-1]), -1)
        tensors[name], end, before = Stored(kind, shape, rows), offset + size, name
    return {name: tensors[name] for name, *_ in infos}
