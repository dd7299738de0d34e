"""What lies in the files of a checkpoint, and a reader that reads of them what is needed and no more.

The files are those of `torch.distributed.checkpoint`: `.metadata` says which blocks of which tensor lie where, each as
`torch.save` writes it, a zip archive whose members are not compressed. So rows can be read where they lie, while
`FileSystemReader` reads blocks whole.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from tutti.graph.step_graph import Spec
from tutti.plan.boxes import Shape
from tutti.run.checkpoint.held import Held

LOCAL_HEADER = 30  # bytes, before the name and the extra field of a member (zip's APPNOTE, 4.3.7)


@dataclass(frozen=True)
class Block:
    """Where it begins in the whole tensor, its sizes, and its bytes in a file: name, offset and count."""

    begin: Shape
    sizes: Shape
    file: str
    offset: int
    count: int


class Stored:
    """The tensors of a checkpoint.

    tensors: what they are, whole. bytes: of numbers that were read. Raises FileNotFoundError where there is none.
    """

    def __init__(self, folder: Path):
        self.folder, self.bytes = folder, 0
        metadata = FileSystemReader(folder).read_metadata()
        self.tensors: dict[str, Spec] = {}
        self.blocks: dict[str, list[Block]] = {}
        self._files: dict[str, np.memmap] = {}
        self._begins: dict[Block, int] = {}
        places: dict[tuple[str, Shape], Any] = {
            (index.fqn, tuple(index.offset or ())): place for index, place in metadata.storage_data.items()
        }
        for name, known in metadata.state_dict_metadata.items():
            if isinstance(known, TensorStorageMetadata):
                self.tensors[name] = Spec(tuple(known.size), known.properties.dtype)
                self.blocks[name] = [_block(chunk, places[name, tuple(chunk.offsets)]) for chunk in known.chunks]

    def load(self, wanted: Mapping[str, Held]) -> None:
        """Read what is held of tensors, by name.

        Raises ValueError for a tensor that is not here, or that is another; nothing has been read then.
        """
        for name, held in wanted.items():
            if name not in self.tensors:
                raise ValueError(f"{self.folder} has no tensor {name!r}")
            if (here := self.tensors[name]) != held.spec:
                raise ValueError(f"{name} has {here.shape} {here.dtype} in {self.folder}, "
                                 f"{held.spec.shape} {held.spec.dtype} is wanted")  # fmt: skip
        for name, held in wanted.items():
            for begin, into in held.first():
                self._fill(name, begin, into)
            held.spread()

    def whole(self, name: str) -> torch.Tensor:
        """A tensor, all of it."""
        spec = self.tensors[name]
        return self.block(name, (0,) * len(spec.shape), spec.shape)

    def block(self, name: str, begin: Shape, sizes: Shape) -> torch.Tensor:
        """A block of a tensor."""
        made = torch.empty(sizes, dtype=self.tensors[name].dtype)
        self._fill(name, begin, made)
        return made

    def _fill(self, name: str, begin: Shape, into: torch.Tensor) -> None:
        for block in self.blocks[name]:
            self._read(block, begin, into)

    def _read(self, block: Block, begin: Shape, into: torch.Tensor) -> None:
        """What a stored block and one that is held share."""
        low = [max(a, b) for a, b in zip(block.begin, begin, strict=True)]
        high = [min(a + n, b + m) for a, n, b, m in zip(block.begin, block.sizes, begin, into.shape, strict=True)]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return
        stored = self._numbers(block, into.dtype)[_slices(low, high, block.begin)]
        part = torch.from_numpy(np.array(stored)).view(into.dtype)  # a copy, of these rows alone
        self.bytes += part.nbytes
        target = into[_slices(low, high, begin)]
        target.copy_(part.view(target.shape))

    def _numbers(self, block: Block, dtype: torch.dtype) -> np.ndarray:
        """A block where it lies, as bytes: its sizes, and the bytes of a number."""
        if block.file not in self._files:
            self._files[block.file] = np.memmap(self.folder / block.file, np.uint8, "r")
        mapped = self._files[block.file]
        if block not in self._begins:
            self._begins[block] = block.offset + _begin(mapped[block.offset : block.offset + block.count])
        begin = self._begins[block]
        return mapped[begin : begin + prod(block.sizes) * dtype.itemsize].reshape(*block.sizes, dtype.itemsize)


def _block(chunk: ChunkStorageMetadata, place: Any) -> Block:
    return Block(tuple(chunk.offsets), tuple(chunk.sizes), place.relative_path, place.offset, place.length)


def _slices(low: list[int], high: list[int], begin: Shape) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, begin, strict=True))


def _begin(archive: np.ndarray) -> int:
    """Where the numbers begin in what `torch.save` wrote of one tensor."""
    with zipfile.ZipFile(_Bytes(archive)) as members:
        (numbers,) = (member for member in members.infolist() if member.filename.endswith("/data/0"))
    header = archive[numbers.header_offset :][:LOCAL_HEADER].tobytes()
    return numbers.header_offset + LOCAL_HEADER + sum(int.from_bytes(header[i : i + 2], "little") for i in (26, 28))


class _Bytes(io.RawIOBase):
    """Bytes of a mapped file as a file, of which only that is read which is asked for."""

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
