"""What this process holds of a whole tensor: blocks, each in the parts of one or several ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tutti.ir.step_graph import Spec
from tutti.plan.boxes import Box, Shape, boxes, is_owner
from tutti.plan.layout import Layout, Mesh


class ShardedTensor:
    """A tensor of a training state, as the ranks of this process have it.

    spec: of the whole. parts: the part of each rank. number: of the tensor among all, so that ranks take turns in
    writing what several hold.
    blocks: memory of each block, by where it begins in the whole tensor, once for each rank. owned: where those begin
    that this process writes.
    """

    def __init__(self, spec: Spec, layout: Layout, mesh: Mesh, parts: Mapping[int, torch.Tensor], number: int = 0):
        self.spec = spec
        self.blocks: dict[Shape, list[torch.Tensor]] = {}
        self.owned: list[Shape] = []
        for rank, part in parts.items():
            found = boxes(layout, spec.shape, mesh, rank)
            for box in found:
                self.blocks.setdefault(box.whole, []).append(_cut(part, box))
            if is_owner(layout, mesh, rank, number):
                self.owned += [box.whole for box in found]

    @staticmethod
    def whole(tensor: torch.Tensor) -> ShardedTensor:
        """All of a tensor, in its own memory."""
        return ShardedTensor(Spec.of(tensor), Layout(), {}, {0: tensor})

    def first(self) -> list[tuple[Shape, torch.Tensor]]:
        """Each block once: where it begins in the whole tensor, and its memory."""
        return [(begin, blocks[0]) for begin, blocks in self.blocks.items()]

    def spread(self) -> None:
        """Give what the first rank of each block has to all others."""
        for first, *others in self.blocks.values():
            for block in others:
                block.copy_(first)


def _cut(part: torch.Tensor, box: Box) -> torch.Tensor:
    """A block of a rank's part, in its memory."""
    return part[tuple(slice(i, i + n) for i, n in zip(box.local, box.sizes, strict=True))]
