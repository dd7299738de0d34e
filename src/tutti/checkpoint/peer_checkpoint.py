"""A checkpoint whose files are spread over machines. A rank reads its machine's files, and receives the rest."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tutti.checkpoint.consensus import Consensus
from tutti.checkpoint.folder import check, manifest
from tutti.checkpoint.reader import CheckpointReader, Piece, StoredBlock

ROUND = 1 << 26  # bytes that a rank requests per round

Pieces = Sequence[tuple[Piece, torch.Tensor]]  # with the destination of each


class PeerCheckpoint(CheckpointReader):
    """The tensors of a checkpoint in memory. Every rank of a job creates one, and all call `load` together.

    about: the manifest. servers: for each file that is only on other machines, the rank that reads it for this one.
    bytes: bytes read so far. sent: those of them that other ranks sent.
    """

    def __init__(self, folder: Path, about: dict[str, Any], metadata: bytes, servers: Mapping[str, int],
                 together: Consensus):  # fmt: skip
        super().__init__(folder, metadata)
        self.about, self.servers, self.together, self.sent = about, servers, together, 0

    @property
    def step(self) -> int:
        """The number of completed steps."""
        return self.about["step"]

    def __str__(self) -> str:
        return f"memory ({self.folder})"

    def _fill(self, pieces: Pieces) -> None:
        super()._fill([x for x in pieces if x[0].block.file not in self.servers])
        rounds = list(_rounds([x for x in pieces if x[0].block.file in self.servers]))
        for i in range(max(self.together.all(len(rounds)))):
            self._ask(rounds[i] if i < len(rounds) else [])
        self._files.clear()  # an open mapping would keep the memory of deleted files

    def _ask(self, pieces: Pieces) -> None:
        """Receive pieces from other ranks, and send the pieces they request."""
        ranks, each = range(self.together.ranks), [self.servers[piece.block.file] for piece, _ in pieces]
        by_rank = [[x for x, rank in zip(pieces, each, strict=True) if rank == r] for r in ranks]
        requests = [json.dumps([_plain(piece) for piece, _ in row]).encode() for row in by_rank]
        received = [[_piece(x) for x in json.loads(bytes(text))] for text in self._swap(requests)]
        answers = self._swap([b"".join(_bytes(self.read(piece)) for piece in row) for row in received])
        for row, answer in zip(by_rank, answers, strict=True):
            begin = 0
            for piece, into in row:
                part = torch.frombuffer(answer, dtype=piece.dtype, count=into.numel(), offset=begin)
                into.copy_(part.view(into.shape))
                begin += piece.bytes
                self.bytes, self.sent = self.bytes + piece.bytes, self.sent + piece.bytes

    def _swap(self, texts: Sequence[bytes]) -> list[bytearray]:
        """All-to-all of byte strings: one for each rank, in rank order."""
        group, counts = self.together.group, torch.tensor([len(text) for text in texts])
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=group)
        sent = torch.frombuffer(bytearray(b"".join(texts)) or bytearray(1), dtype=torch.uint8)[: counts.sum()]
        received = torch.empty(int(theirs.sum()), dtype=torch.uint8)
        dist.all_to_all_single(received, sent, theirs.tolist(), counts.tolist(), group=group)
        return [bytearray(part.numpy().data) for part in received.split(theirs.tolist())]


def _rounds(pieces: Pieces) -> Iterator[Pieces]:
    """Split pieces into rounds of at most ROUND bytes."""
    some, count = [], 0
    for piece, into in pieces:
        if some and count + piece.bytes > ROUND:
            yield some
            some, count = [], 0
        some.append((piece, into))
        count += piece.bytes
    if some:
        yield some


def _bytes(x: torch.Tensor) -> bytes:
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _plain(piece: Piece) -> list:
    """A piece as JSON data."""
    return [astuple(piece.block), piece.low, piece.high, str(piece.dtype).removeprefix("torch.")]


def _piece(plain: list) -> Piece:
    (begin, sizes, file, offset, count), low, high, dtype = plain
    return Piece(
        StoredBlock(tuple(begin), tuple(sizes), file, offset, count), tuple(low), tuple(high), getattr(torch, dtype)
    )


def opened(folder: str | Path | PeerCheckpoint) -> tuple[dict[str, Any], CheckpointReader]:
    """The manifest of a checkpoint, and its tensors.

    Raises ValueError if files are missing or have the wrong size.
    """
    if isinstance(folder, PeerCheckpoint):
        return folder.about, folder
    about = manifest(Path(folder))
    check(Path(folder), parts=0)
    return about, CheckpointReader(Path(folder))
