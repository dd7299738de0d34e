"""Boxes: which contiguous blocks of a whole tensor a rank holds, for files and for whoever reads them.

A layout gives a rank one block of each dim, or several where a split is strided (`plan.layout`): what it holds is their
product. Ranks that differ only along axes that do not split a tensor hold the same; one of them is its owner, in turns,
so that all write about as much, and each byte is written once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

from tutti.plan.layout import Layout, Mesh, coordinates_of

Shape = tuple[int, ...]


@dataclass(frozen=True, order=True)
class Box:
    """A block: where it begins in the whole tensor and in what the rank holds, and its sizes."""

    whole: Shape
    local: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        return prod(self.sizes)


def boxes(layout: Layout, shape: Shape, mesh: Mesh, rank: int) -> list[Box]:
    """What a rank holds of a tensor of this shape; nothing of an empty one.

    Raises ValueError where the tensor cannot lie like that, or ranks hold parts of a sum.
    """
    if layout.partials:
        raise ValueError(f"a tensor that lies as {layout} is a sum over ranks: nobody holds a block of it")
    layout.local_shape(shape, mesh)
    where = coordinates_of(rank, mesh)
    each = [list(_runs(layout, dim, size, mesh, where)) for dim, size in enumerate(shape)]
    found = (Box(*zip(*runs, strict=True)) if runs else Box((), (), ()) for runs in product(*each))
    return [box for box in found if box.numel]


def is_owner(layout: Layout, mesh: Mesh, rank: int, number: int) -> bool:
    """Whether a rank is the one, of all that hold the same, who writes the tensor of this number."""
    where = coordinates_of(rank, mesh)
    return all(where[axis] == digit for axis, digit in turn_of(layout, mesh, number).items())


def turn_of(layout: Layout, mesh: Mesh, number: int) -> dict[str, int]:
    """Where the owner of the tensor of this number lies along the axes that do not split it."""
    beside = [axis for axis in mesh if axis not in layout.splits]
    turn = number % prod(mesh[axis] for axis in beside)
    digits = {}
    for axis in reversed(beside):
        turn, digits[axis] = divmod(turn, mesh[axis])
    return digits


def overlap(begin: Shape, sizes: Shape, other: Shape, others: Shape) -> tuple[Shape, Shape] | None:
    """From where to where in the whole tensor two blocks share numbers, given where they begin and their sizes."""
    low = tuple(max(a, b) for a, b in zip(begin, other, strict=True))
    high = tuple(min(a + n, b + m) for a, n, b, m in zip(begin, sizes, other, others, strict=True))
    return None if any(a >= b for a, b in zip(low, high, strict=True)) else (low, high)


def _runs(layout: Layout, dim: int, size: int, mesh: Mesh, where: Mapping[str, int]) -> Iterator[tuple[int, int, int]]:
    """(begin in the whole dim, begin in the local one, length) of a rank's blocks of a dim."""
    digits = layout.digits(dim, size, mesh)
    held = [i for i, (_, axis) in enumerate(digits) if axis is not None]
    last = held[-1] + 1 if held else 0
    length = prod(n for n, _ in digits[last:])
    choices = [range(n) if axis is None else (where[axis],) for n, axis in digits[:last]]
    for i, chosen in enumerate(product(*choices)):
        begin = 0
        for (n, _), digit in zip(digits, chosen, strict=False):
            begin = begin * n + digit
        yield begin * length, i * length, length
