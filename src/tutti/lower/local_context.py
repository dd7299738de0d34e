"""The context of a local computation: its part of each factor, and communication with its peers."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from tutti.lower.collectives import all_gather, all_reduce, exchange, ppermute
from tutti.ops.rule import REDUCTIONS, Rule
from tutti.plan.layouts.choice import Choices, factor_digits
from tutti.plan.layouts.layout import Digit, Layout, Mesh, inside_node


class LocalContext:
    """The context of a local computation: this rank's part of each factor, and collectives with its peers.

    node_size: as in `Plan`. routing: the groups of experts of a router, and how many of them a token's experts are in;
    None if they may be in any.
    """

    def __init__(self, rule: Rule, choices: Choices, outputs: list[Layout], shapes: list[tuple[int, ...]],
                 mesh: Mesh, where: Mapping[str, int], node_size: int = 0,
                 routing: tuple[int, int] | None = None):  # fmt: skip
        self._rule, self._choices, self._outputs, self._shapes = rule, choices, outputs, shapes
        self._mesh, self._where, self.node_size, self.routing = mesh, where, node_size, routing
        self.asked_where = False  # whether the computation depends on which part this rank has

    @property
    def situation(self) -> tuple:
        """A key of all that the computation may depend on, except the rank."""
        choices = tuple(sorted(self._choices.items()))
        return (
            self._rule.notation,
            tuple(self._rule.sizes.items()),
            choices,
            tuple(self._mesh.items()),
            repr(self._shapes),
            self.node_size,
            self.routing,
        )

    @property
    def choices(self) -> Choices:
        return self._choices

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def where(self) -> Mapping[str, int]:
        """The position of this rank on each axis."""
        self.asked_where = True
        return self._where

    @property
    def rank(self) -> int:
        self.asked_where, rank = True, 0
        for axis, size in self._mesh.items():
            rank = rank * size + self._where[axis]
        return rank

    def _checked(self, factor: str) -> str:
        """Return the factor. Raises ValueError if the rule has no factor of this name."""
        if factor not in self._rule.sizes:
            factors = ", ".join(map(repr, self._rule.sizes))
            raise ValueError(f"no factor {factor!r} in rule {self._rule.notation!r}; it has {factors}")
        return factor

    def axes(self, factor: str) -> list[str]:
        """Return the axes that split a factor, outermost first. Empty if none does."""
        splits = [(outer, axis) for axis, c in self._choices.items() if (outer := c.outer_of(factor)) is not None]
        return [axis for _, axis in sorted(splits)]

    def size(self, factor: str, part: int | None = None) -> int:
        """Return the size of a part of a factor; by default the part of this rank."""
        if part is None and not self.even(factor):
            self.asked_where = True
        where = self._where if part is None else self.coordinates(factor, part)
        return prod(digit.part(self._mesh, where)[1] for digit in self._digits(self._checked(factor)))

    def even(self, factor: str) -> bool:
        """Return whether all parts of a factor have equal sizes."""
        return all(digit.equal(self._mesh) for digit in self._digits(self._checked(factor)))

    def whole(self, factor: str) -> int:
        """Return the size of a factor over all ranks."""
        return self._rule.sizes[self._checked(factor)]

    def joint(self, factor: str) -> bool:
        """Return whether the axes that split a factor split another one at once."""
        return any(self._choices[axis].also for axis in self.axes(factor))

    def offset(self, factor: str) -> int:
        """Return the start of this rank's part of a factor. The part must be contiguous: no split may be strided."""
        self.asked_where = True
        offset, inside = 0, 1
        *split, last = self._digits(self._checked(factor))
        for digit in (*split, last) if last.axes else split:
            assert digit.axes, f"strided split of {factor!r} in {self._rule.notation!r}"
            inside *= digit.size
            offset += digit.part(self._mesh, self._where)[0] * self._rule.sizes[factor] // inside
        return offset

    def all_reduce(self, x: torch.Tensor, factor: str, op: str) -> torch.Tensor:
        """Combine over all ranks that share a factor, by "sum", "avg", "max" or "min"."""
        if op not in REDUCTIONS:
            raise ValueError(f"unknown reduction {op!r} over {factor!r}; expected one of {', '.join(REDUCTIONS)}")
        for axis in self.axes(self._checked(factor)):
            x = all_reduce(x, axis, op)
        return x

    def all_gather(self, x: torch.Tensor, factor: str) -> torch.Tensor:
        """Stack x of all ranks that share a factor, in the order of their parts: (parts, *x)."""
        x = x.unsqueeze(0)
        for axis in reversed(self.axes(self._checked(factor))):
            x = all_gather(x, axis, self._mesh[axis]).flatten(0, 1)
        return x

    def ppermute(self, x: torch.Tensor, factor: str, by: int, edge: float | None = 0.0) -> torch.Tensor:
        """Return the x of the rank whose part of `factor` is `by` places before the part of this rank.

        Past the first and last part, the result is filled with `edge`, or wraps around if `edge` is None.
        """
        return ppermute(x, " ".join(self.axes(self._checked(factor))), f"{by} {'wrap' if edge is None else edge}")

    def exchange(self, x: torch.Tensor, sends: torch.Tensor, receives: torch.Tensor, axes: str, rows: int,
                 expected: int) -> torch.Tensor:  # fmt: skip
        """Send the rows of x to the ranks along axes: the first `sends[0]` to the first of them, and so on.

        sends, receives: (ranks,) int64, the rows for each rank and from each rank. axes: one of `legs`. rows: number
        of rows of the result, which is zero behind the rows that arrive. expected: number of rows that leave a rank if
        they are evenly distributed, for predictions.
        """
        return exchange(x, axes, sends, receives, rows, expected)

    def legs(self, factor: str) -> list[tuple[str, int]]:
        """Return (axis, number of ranks) of the exchanges that reach all ranks that share a factor.

        That is one exchange, or one between nodes and one inside them.
        """
        axes = self.axes(self._checked(factor))
        ranks = self.parts(factor)
        if len(axes) == 1 and (inside := inside_node(axes[0], self._mesh, self.node_size)):
            return [(f"{axes[0]}/{inside}", ranks // inside), (f"{axes[0]}%{inside}", inside)]
        return [(" ".join(axes), ranks)]

    def parts(self, factor: str) -> int:
        """The number of parts of a factor."""
        return prod(self._mesh[axis] for axis in self.axes(factor))

    def part(self, factor: str) -> int:
        """Return the index of this rank's part."""
        self.asked_where, place = True, 0
        for axis in self.axes(self._checked(factor)):
            place = place * self._mesh[axis] + self._where[axis]
        return place

    def coordinates(self, factor: str, part: int) -> dict[str, int]:
        """The position of a part on each axis that splits the factor."""
        where = {}
        for axis in reversed(self.axes(factor)):
            part, where[axis] = divmod(part, self._mesh[axis])
        return where

    def digits(self, factor: str) -> list[tuple[int, str | None]]:
        """An evenly split factor as a mixed-radix number: (size, axis that splits the digit or None for local ones)."""
        return [(size, axes[0] if axes else None) for size, axes in self._digits(factor)]

    def _digits(self, factor: str) -> list[Digit]:
        return factor_digits(self._rule, self._choices, factor, self._mesh)

    def select(self, x: torch.Tensor, dim: int, factor: str, part: int) -> torch.Tensor:
        """The slice of a whole dim that corresponds to a part of the factor."""
        where, digits = self.coordinates(factor, part), self._digits(factor)
        local = (*x.shape[:dim], self.size(factor, part), *x.shape[dim + 1 :])
        x = x.unflatten(dim, [digit.size for digit in digits])
        for i, digit in enumerate(digits):
            x = x.narrow(dim + i, *digit.part(self._mesh, where)) if digit.axes else x
        return x.reshape(local)

    def whole_shape(self, output: int) -> tuple[int, ...]:
        return self._shapes[output]

    def output_shape(self, output: int) -> list[int]:
        layout, shape = self._outputs[output], self._shapes[output]
        if layout.uneven(shape, self._mesh):
            self.asked_where = True
        return list(layout.local_shape(shape, self._mesh, self._where))

    def output_indices(self, output: int) -> tuple[list[int], list[int], int]:
        """Sizes, strides and offset of this rank's elements in the whole output. See `Layout.indices`."""
        self.asked_where = True
        return self._outputs[output].indices(self._shapes[output], self._mesh, self._where)
