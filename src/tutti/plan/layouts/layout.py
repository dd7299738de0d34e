"""Layout: how a tensor is distributed over a mesh.

Each mesh axis has a placement:

- `Split(dim, outer, unit)`: the dim, viewed as `outer x blocks x inner`, is split over n ranks by its blocks. With
  `outer == 1` each rank has one contiguous part. With `outer > 1` the split is *strided*: each rank has a part of each
  of `outer` blocks. `outer` includes the blocks of other axes, so it also orders axes that split the same dim: the axis
  with the smaller `outer` is the outer one.
- `Replicate`: all ranks along the axis have the same values.
- `Partial(op)`: the tensor is the sum (or maximum, ...) of the values of the ranks along the axis.

A dim is thus a mixed-radix number. Each digit is either split or local: see `digits`.

With `unit == 0` the parts are equal. With `unit > 0` the split is *uneven*: the dim is `outer x blocks x unit` elements
and the first ranks have one block more than the last. The unit keeps elements together: 15 heads of 64 elements over 4
ranks are split as 4, 4, 4 and 3 heads. Other axes may split the part of each rank further. Each rank has at least one
block.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

Mesh = Mapping[str, int]  # axis -> size, outermost first; ranks are numbered row-major
Where = Mapping[str, int] | None  # the coordinates of a rank; None: the first


@dataclass(frozen=True, order=True)
class Split:
    dim: int
    outer: int = 1
    unit: int = 0  # elements of a block of an uneven split; 0 if the split is even

    def __str__(self) -> str:
        return f"S{self.dim}" + position_text(self.outer, self.unit)


def position_text(outer: int, unit: int) -> str:
    """The outer blocks of a split if there are several, and the unit if it is uneven: /3, *64, /3*64."""
    return (f"/{outer}" if outer != 1 else "") + (f"*{unit}" if unit else "")


@dataclass(frozen=True, order=True)
class Replicate:
    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, order=True)
class Partial:
    op: str = "sum"

    def __str__(self) -> str:
        return "P" + (f"({self.op})" if self.op != "sum" else "")


Placement = Split | Replicate | Partial
R = Replicate()


def parse_placement(text: str) -> Placement:
    """The inverse of `str(placement)`: R, S0, S1/3, S1/3*64, P, P(max)."""
    if text == "R":
        return R
    if match := re.fullmatch(r"S(\d+)(?:/(\d+))?(?:\*(\d+))?", text):
        return Split(int(match[1]), int(match[2] or 1), int(match[3] or 0))
    if match := re.fullmatch(r"P(?:\((\w+)\))?", text):
        return Partial(match[1] or "sum")
    raise ValueError(f"no placement {text!r}: write R, S<dim>, S<dim>/<outer>, S<dim>*<unit>, P or P(<op>)")


def share(n: int, k: int, i: int) -> tuple[int, int]:
    """The first of the blocks of part i and their number, if n blocks are split into k parts as evenly as possible."""
    each, more = divmod(n, k)
    return i * each + min(i, more), each + (i < more)


class Digit(NamedTuple):
    """A digit of a dim: its size, and the axes that split it, outermost first; none if it is local."""

    size: int
    axes: tuple[str, ...] = ()

    def equal(self, mesh: Mesh) -> bool:
        """Whether all ranks have equally many values."""
        return self.size % prod(mesh[axis] for axis in self.axes) == 0

    def part(self, mesh: Mesh, where: Where = None) -> tuple[int, int]:
        """The first value of the digit that the rank with these coordinates has, and the number of values."""
        first, count = 0, self.size
        for axis in self.axes:
            skipped, count = share(count, mesh[axis], where[axis] if where else 0)
            first += skipped
        return first, count


def digits_of(splits: Iterable[tuple[int, int, str]], size: int, mesh: Mesh) -> list[Digit]:
    """A dim of this size as mixed-radix digits, most significant first, under splits (outer, unit, axis).

    Raises ValueError if the dim cannot be split in this way.
    """
    result: list[Digit] = []
    inside = 1  # product of the sizes of the digits before
    parts, unit_of = 0, 0  # of the last digit if it is uneven: its parts by all axes so far, and its unit
    for outer, unit, axis in sorted(splits):
        k = mesh[axis]
        if parts and (outer, unit) == (inside // result[-1].size * parts, unit_of):  # splits each part again
            blocks, axes = result[-1]
            parts *= k
            result[-1] = Digit(blocks, (*axes, axis))
        else:
            if outer % inside:
                raise ValueError("splits overlap")
            if outer > inside:
                result.append(Digit(outer // inside))
            multiple = unit or k
            if size % (outer * multiple) or size == 0:
                raise ValueError(f"{size} is not a multiple of {outer} x {multiple}")
            blocks, parts, unit_of = (size // (outer * unit), k, unit) if unit else (k, 0, 0)
            result.append(Digit(blocks, (axis,)))
            inside = outer * blocks
        if blocks < parts:
            raise ValueError(f"{blocks} blocks of {unit} are fewer than {parts} parts")
    if size // inside > 1 or not result or size == 0:
        result.append(Digit(size // inside))
    return result


@dataclass(frozen=True)
class Layout:
    """Placements by axis. Axes that are not listed replicate."""

    placements: tuple[tuple[str, Placement], ...] = ()

    @staticmethod
    def of(placements: Mapping[str, Placement]) -> Layout:
        return Layout(tuple(sorted((a, p) for a, p in placements.items() if p != R)))

    def __getitem__(self, axis: str) -> Placement:
        return dict(self.placements).get(axis, R)

    def __str__(self) -> str:
        return " ".join(f"{axis}:{placement}" for axis, placement in self.placements) or "R"

    def replace(self, axis: str, placement: Placement) -> Layout:
        return Layout.of({**dict(self.placements), axis: placement})

    @property
    def splits(self) -> dict[str, Split]:
        return {axis: p for axis, p in self.placements if isinstance(p, Split)}

    @property
    def partials(self) -> dict[str, Partial]:
        return {axis: p for axis, p in self.placements if isinstance(p, Partial)}

    def digits(self, dim: int, size: int, mesh: Mesh) -> list[Digit]:
        """The dim as mixed-radix digits, most significant first. Raises ValueError if it cannot be split as here."""
        try:
            return digits_of([(s.outer, s.unit, a) for a, s in self.splits.items() if s.dim == dim], size, mesh)
        except ValueError as error:
            raise ValueError(
                f"dim {dim} of size {size} cannot be split as {self} on a mesh {dict(mesh)}: {error}"
            ) from None

    def fits(self, shape: tuple[int, ...], mesh: Mesh) -> bool:
        """Whether a tensor of this shape can have this layout."""
        try:
            self.local_shape(shape, mesh)
        except ValueError:
            return False
        return all(s.dim < len(shape) for s in self.splits.values())

    def local_shape(self, shape: tuple[int, ...], mesh: Mesh, where: Where = None) -> tuple[int, ...]:
        """The shape of the part of the rank with these coordinates; by default of the first rank, which is largest.

        Raises ValueError if a tensor of this shape cannot have this layout.
        """
        if beyond := [str(s) for s in self.splits.values() if s.dim >= len(shape)]:
            raise ValueError(f"{beyond[0]} splits a dim that a tensor of shape {shape} does not have")
        if not self.splits:
            return tuple(shape)
        return tuple(
            prod(digit.part(mesh, where)[1] for digit in self.digits(dim, size, mesh)) for dim, size in enumerate(shape)
        )

    def uneven(self, shape: tuple[int, ...], mesh: Mesh) -> bool:
        """Whether some ranks have smaller parts than others."""
        return any(
            not digit.equal(mesh)
            for dim in {s.dim for s in self.splits.values()}
            for digit in self.digits(dim, shape[dim], mesh)
        )

    def local_slice(self, whole: torch.Tensor, mesh: Mesh, coordinates: Mapping[str, int]) -> torch.Tensor:
        """The part of a tensor that the rank with these coordinates has: a view if possible.

        Along a partial axis the first rank has all values and the others have zeros.
        """
        if not self.splits and not self.partials:
            return whole
        local = self.local_shape(tuple(whole.shape), mesh, coordinates)
        digits = [d for dim, size in enumerate(whole.shape) for d in self.digits(dim, size, mesh)]
        part = whole.reshape([d.size for d in digits])[_index(digits, mesh, coordinates)].reshape(local)
        for axis, partial in self.partials.items():
            if partial.op == "sum" and coordinates[axis] != 0:
                part = torch.zeros_like(part)
        return part

    def assemble(self, parts: list[torch.Tensor], shape: tuple[int, ...], mesh: Mesh) -> torch.Tensor:
        """The full tensor from the parts of all ranks, in rank order. The inverse of `local_slice`."""
        partial, split = self.partials, self.splits
        whole = parts[0].new_zeros(shape)
        digits = [d for dim, size in enumerate(shape) for d in self.digits(dim, size, mesh)]
        view = whole.view([d.size for d in digits])
        for rank, part in enumerate(parts):
            where = coordinates_of(rank, mesh)
            if any(where[axis] for axis in mesh if axis not in partial and axis not in split):
                continue  # a replica
            target = view[_index(digits, mesh, where)]
            if partial:
                target += part.reshape(target.shape)
            else:
                target.copy_(part.reshape(target.shape))
        return whole

    def before(self, dim: int, size: int, mesh: Mesh, outer: int, where: Where = None) -> int:
        """The number of blocks of the *local* dim outside the global position `outer`.

        Raises ValueError if the position falls inside a digit that an axis splits.
        """
        position, local = 1, 1
        for digit in self.digits(dim, size, mesh):
            if outer <= position:
                break
            n = digit.size
            step = min(n, outer // position)
            if n % step or (digit.axes and step != n):
                raise ValueError(f"position {outer} of dim {dim} falls inside a digit of {self}")
            position *= step
            local *= digit.part(mesh, where)[1] if digit.axes else step
        if position != outer:
            raise ValueError(f"position {outer} does not divide dim {dim} of size {size} in {self}")
        return local

    def cut(self, axis: str, at: Layout, size: int, mesh: Mesh, where: Where = None) -> tuple[int, int]:
        """Where a local dim in the layout `at`, which does not split it over `axis`, is cut to reach this layout.

        The local dim, viewed as (before, n, rest), is split by its n: returns (before, n). Raises ValueError if this is
        impossible because another axis splits it there in `at`.
        """
        split = self.splits[axis]
        outside = 1
        for digit in self.digits(split.dim, size, mesh):
            if axis in digit.axes:
                break
            outside *= digit.size
        before = at.before(split.dim, size, mesh, outside, where)
        if digit.axes == (axis,):
            at.before(split.dim, size, mesh, outside * digit.size, where)
            return before, digit.size
        other = Digit(digit.size, digit.axes[:-1])
        if digit.axes[-1] != axis or other not in at.digits(split.dim, size, mesh):
            raise ValueError(f"axis {axis!r} of {self} is not the innermost that splits dim {split.dim}")
        return before, other.part(mesh, where)[1]

    def indices(self, shape: tuple[int, ...], mesh: Mesh, coordinates: Mapping[str, int]):
        """The positions of a rank's elements in the full tensor, as (sizes, strides, offset).

        The local element with mixed-radix digits d over `sizes` is element `offset + sum d * strides` of the tensor.
        """
        sizes, strides, offset, stride = [], [], 0, prod(shape)
        for dim, size in enumerate(shape):
            for digit in self.digits(dim, size, mesh):
                stride //= digit.size
                first, count = digit.part(mesh, coordinates)
                offset += first * stride
                if not digit.axes or count > 1:
                    sizes.append(count)
                    strides.append(stride)
        return sizes, strides, offset


def _index(digits: list[Digit], mesh: Mesh, where: Mapping[str, int]) -> tuple[slice, ...]:
    """The values of all digits that the rank with these coordinates has."""
    parts = [digit.part(mesh, where) for digit in digits]
    return tuple(slice(first, first + count) for first, count in parts)


def coordinates_of(rank: int, mesh: Mesh) -> dict[str, int]:
    """The rank's position along each axis."""
    position = {}
    for axis in reversed(list(mesh)):
        rank, position[axis] = divmod(rank, mesh[axis])
    return position


def rank_at(where: Mapping[str, int], mesh: Mesh) -> int:
    """The rank with these coordinates. The inverse of `coordinates_of`."""
    rank = 0
    for axis, size in mesh.items():
        rank = rank * size + where[axis] % size
    return rank


def axis_part(axis: str) -> tuple[str, str, int]:
    """The mesh axis of "ep", "ep%8" (groups of 8 neighbours) or "ep/8" (every 8th rank), the sign or "", the number."""
    for sign in "%/":
        if sign in axis:
            name, count = axis.split(sign)
            return name, sign, int(count)
    return axis, "", 1


def extent(axis: str, mesh: Mesh) -> tuple[int, int]:
    """(size, stride) of the groups along an axis or a part of it (`axis_part`), in ranks."""
    name, sign, count = axis_part(axis)
    stride = prod(list(mesh.values())[list(mesh).index(name) + 1 :])
    if sign == "%":
        return count, stride
    return mesh[name] // count, stride * count


def inside_node(axis: str, mesh: Mesh, node_size: int) -> int:
    """How many ranks of a group along an axis are in one node of so many devices, if the group fills several nodes
    evenly, else 0."""
    size, stride = extent(axis, mesh)
    inside = node_size // stride
    return inside if 1 < inside < size and size % inside == 0 else 0


def group_of(rank: int, axis: str, mesh: Mesh) -> list[int]:
    """The ranks that differ from this one only along `axis` or a part of it, in order, including this one."""
    (name, _, _), (size, stride) = axis_part(axis), extent(axis, mesh)
    outermost = prod(list(mesh.values())[list(mesh).index(name) :])
    within = rank % outermost
    first = rank - within // stride % size * stride
    return [first + i * stride for i in range(size)]


def group_over(rank: int, axes: Sequence[str], mesh: Mesh) -> list[int]:
    """The ranks that differ from this one only along these axes, the first axis outermost."""
    group = [rank]
    for axis in axes:
        group = [member for r in group for member in group_of(r, axis, mesh)]
    return group


def devices(mesh: Mesh) -> int:
    """The number of devices of a mesh."""
    return prod(mesh.values())
