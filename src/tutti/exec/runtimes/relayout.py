"""Moving a tensor from one layout to another, also between meshes: each rank receives the blocks that it lacks.

The blocks of two layouts (`plan.layouts.boxes`) are intersected. A rank copies what it holds already, and receives each
other intersection from one of the ranks that hold it, in turns. Unlike a chain of collectives this works for any two
layouts and sends no byte that the receiver has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from tutti.exec.runtimes.runtime import Runtime, Virtual, raw
from tutti.ir.spec import Spec
from tutti.launch.heartbeat import HEARTBEAT
from tutti.plan.layouts.boxes import Box, Shape, boxes, overlap
from tutti.plan.layouts.layout import Layout, Mesh, coordinates_of, devices


class Placed(NamedTuple):
    """A layout on a mesh."""

    layout: Layout
    mesh: Mesh


class Piece(NamedTuple):
    """A block that one rank needs and another has. low, high: its bounds in the full tensor."""

    source: int
    target: int
    low: Shape
    high: Shape
    read: Box
    write: Box

    @property
    def sizes(self) -> Shape:
        return tuple(b - a for a, b in zip(self.low, self.high, strict=True))

    def of(self, part: torch.Tensor, box: Box) -> torch.Tensor:
        """The block as a view of a rank's part. box: the part's block that contains it."""
        begin = [low - whole + local for low, whole, local in zip(self.low, box.whole, box.local, strict=True)]
        return part[tuple(slice(i, i + n) for i, n in zip(begin, self.sizes, strict=True))]


def pieces(shape: Shape, before: Placed, after: Placed) -> list[Piece]:
    """All blocks that ranks copy or receive, in the same order on every rank."""
    holders: dict[Box, list[int]] = {}
    for rank in range(devices(before.mesh)):
        for box in boxes(before.layout, shape, before.mesh, rank):
            holders.setdefault(box, []).append(rank)
    overlaps = []
    for target in range(devices(after.mesh)):
        for write in boxes(after.layout, shape, after.mesh, target):
            for read, ranks in holders.items():
                if shared := overlap(read.whole, read.sizes, write.whole, write.sizes):
                    source = target if target in ranks else ranks[target % len(ranks)]
                    overlaps.append(Piece(source, target, *shared, read, write))
    return overlaps


def move(
    runtime: Runtime, parts: Mapping[int, torch.Tensor], spec: Spec, before: Placed, after: Placed, device: torch.device
) -> tuple[dict[int, torch.Tensor], int]:
    """Lay a tensor out anew. Returns the new parts of the local ranks, and the bytes that they received from others.

    parts: the old parts of the local ranks. spec: shape and dtype of the full tensor. device: device of the new parts.
    Every rank of a job must call it.
    """
    ranks = list(parts) if isinstance(runtime, Virtual) else [runtime.rank]
    moved = {}
    for rank in ranks:
        local = after.layout.local_shape(spec.shape, after.mesh, coordinates_of(rank, after.mesh))
        moved[rank] = torch.empty(local, dtype=spec.dtype, device=device)
    sends, arrivals, received = [], [], 0
    for piece in pieces(spec.shape, before, after):
        own = piece.target in moved
        if own and piece.source != piece.target:
            received += Spec(piece.sizes, spec.dtype).bytes
        if own and piece.source in parts:
            piece.of(moved[piece.target], piece.write).copy_(piece.of(parts[piece.source], piece.read))
        elif own:
            block = torch.empty(piece.sizes, dtype=spec.dtype, device=device)
            sends.append(dist.P2POp(dist.irecv, raw(block), piece.source))
            arrivals.append((piece, block))
        elif piece.source in parts:
            block = piece.of(parts[piece.source], piece.read).to(device).contiguous()
            sends.append(dist.P2POp(dist.isend, raw(block), piece.target))
    if sends:
        with HEARTBEAT.within("send and receive", "a tensor that changes its layout"):
            for work in dist.batch_isend_irecv(sends):
                work.wait()
    for piece, block in arrivals:
        piece.of(moved[piece.target], piece.write).copy_(block)
    return moved, received
