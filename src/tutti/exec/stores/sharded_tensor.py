"""ShardedTensor: the blocks of a full tensor that this process holds."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tutti.ir.spec import Spec
from tutti.plan.layouts.boxes import Box, Shape, boxes, is_owner
from tutti.plan.layouts.layout import Layout, Mesh


class ShardedTensor:
    """The local parts of a tensor as blocks of the full tensor.

    spec: shape and dtype of the full tensor. parts: local parts by rank. number: index of the tensor, so that ranks
    take turns in writing replicas.
    blocks: memory of each block by its begin in the full tensor, once for each rank. owned: begins of the blocks that
    this process writes.
    """

    def __init__(self, spec: Spec, layout: Layout, mesh: Mesh, parts: Mapping[int, torch.Tensor], number: int = 0):
        self.spec = spec
        self.blocks: dict[Shape, list[torch.Tensor]] = {}
        self.owned: list[Shape] = []
        for rank, part in parts.items():
            own_boxes = boxes(layout, spec.shape, mesh, rank)
            for box in own_boxes:
                self.blocks.setdefault(box.whole, []).append(_cut(part, box))
            if is_owner(layout, mesh, rank, number):
                self.owned += [box.whole for box in own_boxes]

    @staticmethod
    def whole(tensor: torch.Tensor) -> ShardedTensor:
        """A full tensor as one block."""
        return ShardedTensor(Spec.of(tensor), Layout(), {}, {0: tensor})

    def first(self) -> list[tuple[Shape, torch.Tensor]]:
        """Each block once: its begin in the full tensor, and its memory."""
        return [(begin, blocks[0]) for begin, blocks in self.blocks.items()]

    def spread(self) -> None:
        """Copy each block from its first rank to the others."""
        for first, *others in self.blocks.values():
            for block in others:
                block.copy_(first)


def _cut(part: torch.Tensor, box: Box) -> torch.Tensor:
    """A block of a rank's part, as a view."""
    return part[tuple(slice(i, i + n) for i, n in zip(box.local, box.sizes, strict=True))]
