"""Boxes: the contiguous blocks of a tensor that a rank has, for reading and writing files.

A layout gives a rank one block of each dim, or several if a split is strided (`plan.layouts.layout`). The rank's boxes
are the product over dims. Ranks that differ only along axes that do not split a tensor have the same boxes. One of them
is the owner and writes them. The owner alternates between tensors, so that all ranks write about as many bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

from tutti.plan.layouts.layout import Layout, Mesh, coordinates_of

Shape = tuple[int, ...]


@dataclass(frozen=True, order=True)
class Box:
    """A block: its position in the full tensor, its position in the rank's part, and its sizes."""

    whole: Shape
    local: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        return prod(self.sizes)


def boxes(layout: Layout, shape: Shape, mesh: Mesh, rank: int) -> list[Box]:
    """The boxes of a rank for a tensor of this shape; an empty tensor has none.

    Raises ValueError if the tensor cannot have this layout, or if the layout is partial.
    """
    if layout.partials:
        raise ValueError(f"a tensor with layout {layout} is a sum over ranks: no rank has a block of it")
    layout.local_shape(shape, mesh)
    where = coordinates_of(rank, mesh)
    each = [list(_runs(layout, dim, size, mesh, where)) for dim, size in enumerate(shape)]
    candidates = (Box(*zip(*runs, strict=True)) if runs else Box((), (), ()) for runs in product(*each))
    return [box for box in candidates if box.numel]


def is_owner(layout: Layout, mesh: Mesh, rank: int, number: int) -> bool:
    """Whether this rank writes the tensor with this number, among all ranks that have the same part."""
    where = coordinates_of(rank, mesh)
    return all(where[axis] == digit for axis, digit in turn_of(layout, mesh, number).items())


def turn_of(layout: Layout, mesh: Mesh, number: int) -> dict[str, int]:
    """The coordinates of the owner of the tensor with this number, along the axes that do not split it."""
    beside = [axis for axis in mesh if axis not in layout.splits]
    turn = number % prod(mesh[axis] for axis in beside)
    digits = {}
    for axis in reversed(beside):
        turn, digits[axis] = divmod(turn, mesh[axis])
    return digits


def overlap(begin: Shape, sizes: Shape, other: Shape, others: Shape) -> tuple[Shape, Shape] | None:
    """The intersection (begin, end) of two blocks in the full tensor, given their begins and sizes; None if empty."""
    low = tuple(max(a, b) for a, b in zip(begin, other, strict=True))
    high = tuple(min(a + n, b + m) for a, n, b, m in zip(begin, sizes, other, others, strict=True))
    return None if any(a >= b for a, b in zip(low, high, strict=True)) else (low, high)


def _runs(layout: Layout, dim: int, size: int, mesh: Mesh, where: Mapping[str, int]) -> Iterator[tuple[int, int, int]]:
    """(begin in the full dim, begin in the local dim, length) of each of a rank's blocks of a dim."""
    digits = layout.digits(dim, size, mesh)
    split_digits = [i for i, digit in enumerate(digits) if digit.axes]
    last = split_digits[-1] if split_digits else 0
    inner = prod(digit.size for digit in digits[last + 1 :])
    first, count = digits[last].part(mesh, where)  # neighbours, so they and what is inside them are one run
    parts = [digit.part(mesh, where) for digit in digits[:last]]
    length = count * inner
    for i, chosen in enumerate(product(*(range(begin, begin + n) for begin, n in parts))):
        begin = 0
        for digit, value in zip(digits, chosen, strict=False):
            begin = begin * digit.size + value
        yield (begin * digits[last].size + first) * inner, i * length, length
