"""Layout: how a tensor is distributed over a mesh.

Each mesh axis has a placement:

- `Split(dim, outer)`: the dim, viewed as `outer x n x inner` where n is the size of the axis, is split over n. With
  `outer == 1` each rank has one contiguous block. With `outer > 1` the split is *strided*: each rank has a part of each
  of `outer` blocks. `outer` includes the blocks of other axes, so it also orders axes that split the same dim: the axis
  with the smaller `outer` is the outer one.
- `Replicate`: all ranks along the axis have the same values.
- `Partial(op)`: the tensor is the sum (or maximum, ...) of the values of the ranks along the axis.

A dim is thus a mixed-radix number. Each digit is either split over an axis or local: see `digits`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

Mesh = Mapping[str, int]  # axis -> size, outermost first; ranks are numbered row-major


@dataclass(frozen=True, order=True)
class Split:
    dim: int
    outer: int = 1

    def __str__(self) -> str:
        return f"S{self.dim}" + (f"/{self.outer}" if self.outer != 1 else "")


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
    """The inverse of `str(placement)`: R, S0, S1/3, P, P(max)."""
    if text == "R":
        return R
    if match := re.fullmatch(r"S(\d+)(?:/(\d+))?", text):
        return Split(int(match[1]), int(match[2] or 1))
    if match := re.fullmatch(r"P(?:\((\w+)\))?", text):
        return Partial(match[1] or "sum")
    raise ValueError(f"no placement {text!r}: write R, S<dim>, S<dim>/<outer>, P or P(<op>)")


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

    def digits(self, dim: int, size: int, mesh: Mesh) -> list[tuple[int, str | None]]:
        """The dim as mixed-radix digits (size, axis that splits it or None), most significant first.

        Raises ValueError if the size does not divide.
        """
        held = sorted((s.outer, axis) for axis, s in self.splits.items() if s.dim == dim)
        result, inside = [], 1
        for outer, axis in held:
            if outer % inside or size % (outer * mesh[axis]) or size == 0:
                raise ValueError(
                    f"dim {dim} of size {size} cannot be split as {self} on a mesh {dict(mesh)}: "
                    f"{size} is not a multiple of {outer} x {mesh[axis]}"
                    if outer % inside == 0
                    else f"splits of dim {dim} in {self} overlap on a mesh {dict(mesh)}"
                )
            if outer > inside:
                result.append((outer // inside, None))
            result.append((mesh[axis], axis))
            inside = outer * mesh[axis]
        if size // inside > 1 or not result or size == 0:
            result.append((size // inside, None))
        return result

    def fits(self, shape: tuple[int, ...], mesh: Mesh) -> bool:
        """Whether a tensor of this shape can have this layout."""
        try:
            self.local_shape(shape, mesh)
        except ValueError:
            return False
        return all(s.dim < len(shape) for s in self.splits.values())

    def local_shape(self, shape: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
        """The shape of each rank's part. Raises ValueError if the shape cannot have this layout."""
        if beyond := [str(s) for s in self.splits.values() if s.dim >= len(shape)]:
            raise ValueError(f"{beyond[0]} splits a dim that a tensor of shape {shape} does not have")
        return tuple(
            prod(n for n, axis in self.digits(dim, size, mesh) if axis is None) for dim, size in enumerate(shape)
        )

    def local_slice(self, whole: torch.Tensor, mesh: Mesh, coordinates: Mapping[str, int]) -> torch.Tensor:
        """The part of a tensor that the rank with these coordinates has: a view if possible.

        Along a partial axis the first rank has all values and the others have zeros.
        """
        local = self.local_shape(tuple(whole.shape), mesh)
        sizes, index = [], []
        for dim, size in enumerate(whole.shape):
            for n, axis in self.digits(dim, size, mesh):
                sizes.append(n)
                index.append(slice(None) if axis is None else coordinates[axis])
        part = whole.reshape(sizes)[tuple(index)].reshape(local)
        for axis, partial in self.partials.items():
            if partial.op == "sum" and coordinates[axis] != 0:
                part = torch.zeros_like(part)
        return part

    def assemble(self, parts: list[torch.Tensor], shape: tuple[int, ...], mesh: Mesh) -> torch.Tensor:
        """The full tensor from the parts of all ranks, in rank order. The inverse of `local_slice`."""
        partial, split = self.partials, self.splits
        whole = parts[0].new_zeros(shape)
        digits = [d for dim, size in enumerate(shape) for d in self.digits(dim, size, mesh)]
        view = whole.view([n for n, _ in digits])
        for rank, part in enumerate(parts):
            where = coordinates_of(rank, mesh)
            if any(where[axis] for axis in mesh if axis not in partial and axis not in split):
                continue  # a replica
            target = view[tuple(slice(None) if axis is None else where[axis] for _, axis in digits)]
            if partial:
                target += part.reshape(target.shape)
            else:
                target.copy_(part.reshape(target.shape))
        return whole

    def before(self, dim: int, size: int, mesh: Mesh, outer: int) -> int:
        """The number of blocks of the *local* dim outside the global position `outer`.

        Raises ValueError if the position falls inside a digit that an axis splits.
        """
        position, local = 1, 1
        for n, axis in self.digits(dim, size, mesh):
            if outer <= position:
                break
            step = min(n, outer // position)
            if n % step or (axis is not None and step != n):
                raise ValueError(f"position {outer} of dim {dim} falls inside a digit of {self}")
            position *= step
            local *= step if axis is None else 1
        if position != outer:
            raise ValueError(f"position {outer} does not divide dim {dim} of size {size} in {self}")
        return local

    def indices(self, shape: tuple[int, ...], mesh: Mesh, coordinates: Mapping[str, int]):
        """The positions of a rank's elements in the full tensor, as (sizes, strides, offset).

        The local element with mixed-radix digits d over `sizes` is element `offset + sum d * strides` of the tensor.
        """
        sizes, strides, offset, stride = [], [], 0, prod(shape)
        for dim, size in enumerate(shape):
            for n, axis in self.digits(dim, size, mesh):
                stride //= n
                if axis is None:
                    sizes.append(n)
                    strides.append(stride)
                else:
                    offset += coordinates[axis] * stride
        return sizes, strides, offset


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


def group_of(rank: int, axis: str, mesh: Mesh) -> list[int]:
    """The ranks that differ from this one only along `axis`, in order, including this one."""
    stride = prod(list(mesh.values())[list(mesh).index(axis) + 1 :])
    first = rank - coordinates_of(rank, mesh)[axis] * stride
    return [first + i * stride for i in range(mesh[axis])]


def group_over(rank: int, axes: Sequence[str], mesh: Mesh) -> list[int]:
    """The ranks that differ from this one only along these axes, the first axis outermost."""
    group = [rank]
    for axis in axes:
        group = [member for r in group for member in group_of(r, axis, mesh)]
    return group


def devices(mesh: Mesh) -> int:
    """The number of devices of a mesh."""
    return prod(mesh.values())
