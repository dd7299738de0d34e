"""What lies in the files of a checkpoint, and a reader that reads of them what is needed and no more.

The files are those of `torch.distributed.checkpoint`: `.metadata` says which blocks of which tensor lie where, each as
`torch.save` writes it, a zip archive whose members are not compressed. So rows can be read where they lie, while
`FileSystemReader` reads blocks whole.
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
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata

from tutti.graph.step_graph import Spec
from tutti.plan.boxes import Shape, overlap
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


@dataclass(frozen=True)
class Piece:
    """What a stored block and one that is held share: from where to where in the whole tensor."""

    block: Block
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
        """... in a block that begins there."""
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.low, self.high, begin, strict=True))


class Stored:
    """The tensors of a checkpoint.

    metadata: its `.metadata`, read where it is not given. tensors: what they are, whole. bytes: of numbers that were
    read. Raises FileNotFoundError where there is none.
    """

    def __init__(self, folder: Path, metadata: Metadata | None = None):
        self.folder, self.bytes = folder, 0
        metadata = metadata or FileSystemReader(folder).read_metadata()
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
        self._fill([x for name, held in wanted.items() for x in self._pieces(name, held.first())])
        for held in wanted.values():
            held.spread()

    def whole(self, name: str) -> torch.Tensor:
        """A tensor, all of it."""
        spec = self.tensors[name]
        return self.block(name, (0,) * len(spec.shape), spec.shape)

    def block(self, name: str, begin: Shape, sizes: Shape) -> torch.Tensor:
        """A block of a tensor."""
        made = torch.empty(sizes, dtype=self.tensors[name].dtype)
        self._fill(list(self._pieces(name, [(begin, made)])))
        return made

    def _pieces(self, name: str, wanted: Iterable[tuple[Shape, torch.Tensor]]) -> Iterator[tuple[Piece, torch.Tensor]]:
        """What is to be read of a tensor, and into what memory."""
        for begin, into in wanted:
            for block in self.blocks[name]:
                if shared := overlap(block.begin, block.sizes, begin, tuple(into.shape)):
                    piece = Piece(block, *shared, into.dtype)
                    yield piece, into[piece.within(begin)]

    def _fill(self, pieces: Sequence[tuple[Piece, torch.Tensor]]) -> None:
        for piece, into in pieces:
            into.copy_(self.read(piece).view(into.shape))
            self.bytes += piece.bytes

    def read(self, piece: Piece) -> torch.Tensor:
        """A copy of what lies in a file here, of these rows alone: bytes of numbers, in their order."""
        stored = self._numbers(piece.block, piece.dtype)[piece.within(piece.block.begin)]
        return torch.from_numpy(np.array(stored)).view(piece.dtype)

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
