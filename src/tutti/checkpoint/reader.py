"""A reader of checkpoint files that reads only the rows it needs.

The files are those of `torch.distributed.checkpoint`. `.metadata` says where the blocks of each tensor are stored. Each
block is a `torch.save` zip archive without compression, so single rows can be read in place; `FileSystemReader` would
read whole blocks. The pickles in these files are never executed: see `unpickle`.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tutti.checkpoint import unpickle
from tutti.checkpoint.folder import MANIFEST, METADATA, Files, fault_of, file_in, manifest
from tutti.exec.stores.sharded_tensor import ShardedTensor
from tutti.ir.spec import Spec
from tutti.plan.layouts.boxes import Shape, overlap

LOCAL_HEADER = 30  # bytes, before the name and the extra field of a member (zip's APPNOTE, 4.3.7)


@dataclass(frozen=True)
class StoredBlock:
    """A stored block: its offsets in the full tensor, its sizes, and its file, offset and byte count there."""

    begin: Shape
    sizes: Shape
    file: str
    offset: int
    count: int


@dataclass(frozen=True)
class Piece:
    """The overlap of a stored block and a local one: from `low` to `high` in the full tensor."""

    block: StoredBlock
    low: Shape
    high: Shape
    dtype: torch.dtype

    @property
    def sizes(self) -> Shape:
        return tuple(b - a for a, b in zip(self.low, self.high, strict=True))

    @property
    def bytes(self) -> int:
        return prod(self.sizes) * self.dtype.itemsize

    def within(self, begin: Shape) -> tuple[slice, ...]:
        """The overlap as slices of a block that starts at `begin`."""
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.low, self.high, begin, strict=True))


class CheckpointReader:
    """The tensors of a checkpoint.

    metadata: the bytes of its `.metadata`, of a checkpoint that is verified already; read from the folder if None.
    tensors: the Spec of each full tensor. bytes: bytes of tensor data read so far. Each file is compared with its
    checksum in the manifest before tensors are read from it; folders of `torch.distributed.checkpoint` have none.
    Raises FileNotFoundError if there is no checkpoint, and ValueError if it is damaged, would run code, or names a file
    outside the folder.
    """

    def __init__(self, folder: Path, metadata: bytes | None = None):
        self.folder, self.bytes = folder, 0
        self._described: Files = {}
        if metadata is None and (folder / MANIFEST).exists():
            self._described = manifest(folder)["files"]
        self._verify(METADATA)
        content = file_in(folder, METADATA).read_bytes() if metadata is None else metadata
        self.tensors: dict[str, Spec] = {}
        self.blocks: dict[str, list[StoredBlock]] = {}
        self._files: dict[str, np.memmap] = {}
        self._places: dict[StoredBlock, tuple[int, int, Shape]] = {}
        try:
            self._take(unpickle.metadata(content))
        except (ValueError, AttributeError, TypeError, KeyError) as error:
            message = error if isinstance(error, ValueError) else f"its {METADATA} is damaged: {error!r}"
            raise ValueError(f"{folder} cannot be loaded: {message}") from None

    def _take(self, metadata: Any) -> None:
        """Set tensors and blocks from a `.metadata`."""
        places: dict[tuple[str, Shape], Any] = {
            (index.fqn, tuple(getattr(index, "offset", None) or ())): place
            for index, place in metadata.storage_data.items()
        }
        paths = {place.relative_path for place in places.values()}
        self._paths = {name: file_in(self.folder, name) for name in sorted(paths)}
        for name, entry in metadata.state_dict_metadata.items():
            if hasattr(entry, "chunks"):
                dtype = entry.properties.state[0]
                if not isinstance(dtype, torch.dtype):
                    raise TypeError(f"{name} has dtype {dtype}")
                self.tensors[name] = Spec(tuple(entry.size), dtype)
                self.blocks[name] = [_block(chunk, places[name, tuple(chunk.offsets)]) for chunk in entry.chunks]

    def load(self, tensors: Mapping[str, ShardedTensor]) -> None:
        """Read the local blocks of tensors, by name.

        Raises ValueError, before anything is read, if a tensor is missing or has another shape or dtype.
        """
        for name, tensor in tensors.items():
            if name not in self.tensors:
                raise ValueError(f"{self.folder} has no tensor {name!r}")
            if (here := self.tensors[name]) != tensor.spec:
                raise ValueError(f"{name} is {here} in {self.folder}; {tensor.spec} is expected")
        self._fill([x for name, tensor in tensors.items() for x in self._pieces(name, tensor.first())])
        for tensor in tensors.values():
            tensor.spread()

    def whole(self, name: str) -> torch.Tensor:
        """The full tensor."""
        spec = self.tensors[name]
        return self.block(name, (0,) * len(spec.shape), spec.shape)

    def block(self, name: str, begin: Shape, sizes: Shape) -> torch.Tensor:
        """A block of a tensor: from offsets `begin`, of these sizes."""
        tensor = torch.empty(sizes, dtype=self.tensors[name].dtype)
        self._fill(list(self._pieces(name, [(begin, tensor)])))
        return tensor

    def _pieces(self, name: str, targets: Iterable[tuple[Shape, torch.Tensor]]) -> Iterator[tuple[Piece, torch.Tensor]]:
        """The pieces to read of a tensor, each with the tensor to copy it into."""
        for begin, into in targets:
            for block in self.blocks[name]:
                if shared := overlap(block.begin, block.sizes, begin, tuple(into.shape)):
                    piece = Piece(block, *shared, into.dtype)
                    yield piece, into[piece.within(begin)]

    def _fill(self, pieces: Sequence[tuple[Piece, torch.Tensor]]) -> None:
        for piece, _ in pieces:  # check all before anything changes
            self._numbers(piece.block, piece.dtype)
        for piece, into in pieces:
            into.copy_(self.read(piece).view(into.shape))
            self.bytes += piece.bytes

    def read(self, piece: Piece) -> torch.Tensor:
        """A copy of a piece, read from a local file."""
        stored = self._numbers(piece.block, piece.dtype)[piece.within(piece.block.begin)]
        return torch.from_numpy(np.array(stored)).view(piece.dtype)

    def _numbers(self, block: StoredBlock, dtype: torch.dtype) -> np.ndarray:
        """A memory-mapped block: uint8 of the block's sizes, plus a last dim for the bytes of an element."""
        if block.file not in self._files:
            self._verify(block.file)
            self._files[block.file] = np.memmap(self._paths[block.file], np.uint8, "r")
        archive = self._files[block.file][block.offset : block.offset + block.count]
        if block not in self._places:
            try:
                self._places[block] = _place(archive, block.sizes, dtype.itemsize)
            except (ValueError, OverflowError, zipfile.BadZipFile) as error:
                raise ValueError(f"{self.folder} cannot be loaded: in {block.file}, {error}") from None
        begin, count, strides = self._places[block]
        shape, steps = (*block.sizes, dtype.itemsize), (*(x * dtype.itemsize for x in strides), 1)
        return np.lib.stride_tricks.as_strided(archive[begin : begin + count], shape, steps, writeable=False)

    def _verify(self, name: str) -> None:
        """Raise ValueError if a file is not as its manifest says."""
        if name in self._described and (fault := fault_of(file_in(self.folder, name), self._described[name])):
            raise ValueError(f"{self.folder} cannot be loaded: {name} {fault}")


def _block(chunk: Any, place: Any) -> StoredBlock:
    numbers = (*chunk.offsets, *chunk.sizes, place.offset, place.length)
    if not all(type(x) is int and x >= 0 for x in numbers) or getattr(place, "transform_descriptors", None):
        raise TypeError("a block has no storage location, or its data is compressed")
    return StoredBlock(tuple(chunk.offsets), tuple(chunk.sizes), place.relative_path, place.offset, place.length)


def _place(archive: np.ndarray, sizes: Shape, itemsize: int) -> tuple[int, int, Shape]:
    """Offset of the data in a `torch.save` archive of one tensor, its bytes, and its strides.

    Raises ValueError if the archive is not a tensor of these sizes.
    """
    with zipfile.ZipFile(_Bytes(archive)) as members:
        named = {member.filename.partition("/")[2]: member for member in members.infolist()}
    if not {"data.pkl", "data/0"} <= named.keys():
        raise ValueError("a stored tensor has no data")
    offset, stored_sizes, strides = unpickle.tensor_header(archive[_extent(archive, named["data.pkl"])].tobytes())
    stored = _extent(archive, named["data/0"])
    count = (1 + sum((n - 1) * x for n, x in zip(sizes, strides, strict=False))) * itemsize if prod(sizes) else 0
    begin = stored.start + offset * itemsize
    if stored_sizes != sizes or begin + count > stored.stop:
        raise ValueError(f"a stored tensor has other sizes than the {sizes} in the metadata")
    return begin, count, strides


def _extent(archive: np.ndarray, member: zipfile.ZipInfo) -> slice:
    """The bytes of a zip member. Its CRC is not checked: the manifest has a checksum of the file."""
    header = archive[member.header_offset :][:LOCAL_HEADER].tobytes()
    begin = member.header_offset + LOCAL_HEADER + sum(int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
    end = begin + member.file_size
    if member.compress_type != zipfile.ZIP_STORED or member.header_offset < 0 or end > len(archive):
        raise ValueError("a stored tensor is compressed or truncated")
    return slice(begin, end)


class _Bytes(io.RawIOBase):
    """A byte array as a file. Reads only what is requested, as the array may be a memory map."""

    def __init__(self, data: np.ndarray):
        self.data, self.at = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, to: int, whence: int = 0) -> int:
        self.at = (0, self.at, len(self.data))[whence] + to
        return self.at

    def readinto(self, buffer) -> int:
        part = self.data[self.at : self.at + len(buffer)].tobytes()
        buffer[: len(part)] = part
        self.at += len(part)
        return len(part)
