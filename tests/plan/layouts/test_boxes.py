"""The blocks that ranks hold are those of their layout, and each has one owner."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from tutti.plan.layouts.boxes import Box, boxes, is_owner
from tutti.plan.layouts.layout import Layout, Partial, Split, coordinates_of, devices

MESH = {"a": 2, "b": 3, "c": 2}


def drawn(seed: int) -> tuple[Layout, tuple[int, ...], dict[str, int]]:
    """A layout that splits some dims, strided ones too, of a tensor that divides."""
    random.seed(seed)
    axes = random.sample(list(MESH), random.randint(0, 3))
    mesh = {axis: MESH[axis] for axis in random.sample(list(MESH), 3)}
    sizes, placements = [], {}
    for dim in range(random.randint(1, 3)):
        size = random.choice((1, 2, 3))
        while axes and random.random() < 0.6:
            axis = axes.pop()
            placements[axis] = Split(dim, size)
            size *= mesh[axis] * random.choice((1, 2))
        sizes.append(size * random.choice((1, 5)))
    return Layout.of(placements), tuple(sizes), mesh


@pytest.mark.parametrize("seed", range(60))
def test_blocks_are_what_a_rank_holds(seed):
    layout, shape, mesh = drawn(seed)
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    written = Counter[int]()
    for rank in range(devices(mesh)):
        part = layout.local_slice(whole, mesh, coordinates_of(rank, mesh))
        blocks = boxes(layout, shape, mesh, rank)
        assert sum(box.numel for box in blocks) == part.numel()
        for box in blocks:
            there = whole[tuple(slice(i, i + n) for i, n in zip(box.whole, box.sizes, strict=True))]
            here = part[tuple(slice(i, i + n) for i, n in zip(box.local, box.sizes, strict=True))]
            assert torch.equal(there, here)
        if is_owner(layout, mesh, rank, seed):
            written.update(part.flatten().tolist())
    assert written == Counter(range(whole.numel())), "each number once"


def test_owners_take_turns():
    layout, mesh = Layout.of({"tp": Split(0)}), {"dp": 4, "tp": 2}
    owned = Counter(rank for number in range(12) for rank in range(8) if is_owner(layout, mesh, rank, number))
    assert owned == Counter({rank: 3 for rank in range(8)})


def test_a_number_is_one_block_and_an_empty_tensor_none():
    assert boxes(Layout(), (), {"dp": 2}, 1) == [Box((), (), ())]
    assert boxes(Layout(), (0, 3), {"dp": 2}, 0) == []


def test_sums_are_nobody_s():
    with pytest.raises(ValueError, match="is a sum over ranks"):
        boxes(Layout.of({"dp": Partial()}), (4,), {"dp": 2}, 0)
