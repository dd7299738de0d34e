"""Slices and selections, their backward passes, and writing into them.

| the slice is | its dim is | splitting it |
|---|---|---|
| one of several equal blocks, `x[n:2 * n]` | (y z) | over z, strided, it is free; over y the block is one rank's |
| every n-th row, `x[1::2]` | (z y) | over z it is free |
| anything else | x | each rank has some of the rows, or none |

Ranks without a row of the result have zeros there: it is a partial sum.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch

from tutti.ir.op_info import ARGUMENTS, LOCAL
from tutti.ir.step_graph import Call
from tutti.ops.registry import named, operands, rules
from tutti.ops.view import names, output_shape

aten = torch.ops.aten


class Rows(NamedTuple):
    """The rows start, start + step, ... of a dim, `length` of them."""

    size: int
    start: int
    step: int
    length: int

    @property
    def is_block(self) -> bool:
        return self.step == 1 and self.length > 0 and self.size % self.length == self.start % self.length == 0

    @property
    def is_stride(self) -> bool:
        return self.step > 1 and self.start < self.step and self.length * self.step == self.size

    @property
    def factors(self) -> tuple[str, str, dict[str, int]]:
        """Names of the dim and of the slice, and sizes that shapes do not determine."""
        if self.is_block:
            return "(y* z@)", "z@", {"z": self.length}
        if self.is_stride:
            return "(z y!)", "z", {"z": self.length}
        return "x*", "r!", {}

    def of(self, here) -> tuple[int, int, int, int]:
        """This rank's part: (first, last) rows of the slice that it has, starting at its row `at`, and the local length
        of the slice."""
        if not here.axes("x"):  # a block
            n, at = here.size("z"), self.start // self.length - here.offset("y")
            return (0, n, at * n, n) if 0 <= at < here.size("y") else (0, 0, 0, n)
        begin, end = here.offset("x"), here.offset("x") + here.size("x")
        first, last = (min(max(-((self.start - x) // self.step), 0), self.length) for x in (begin, end))
        return first, last, self.start + first * self.step - begin, self.length


def rows_of(size: int, length: int, start: int | None, step: int) -> Rows:
    start = 0 if start is None else start + size if start < 0 else start
    return Rows(size, min(max(start, 0), size), step, length)


def _slice_rule(whole_at: int, part_at: int):
    """The rule of an operator on a tensor and a slice of it, each an operand or (-1) the result."""

    def notation(node: Call):
        arguments = named(node.target, node.args, node.kwargs)
        whole, part = ((node if i < 0 else operands(node)[i]).meta["val"].shape for i in (whole_at, part_at))
        dim = arguments["dim"] % len(whole)
        if 0 in part:
            return _nothing(whole, part, whole_at, part_at)
        left, right, sizes = rows_of(whole[dim], part[dim], arguments["start"], arguments["step"]).factors
        dims = names(whole)
        lines = {whole_at: [*dims[:dim], left, *dims[dim + 1 :]], part_at: [*dims[:dim], right, *dims[dim + 1 :]]}
        inputs = ", ".join(" ".join(line) for i, line in sorted(lines.items()) if i >= 0)
        linear = "~01" if whole_at == 0 and part_at == 1 else "~0"
        return f"{inputs} -> {' '.join(lines.get(-1, lines[whole_at]))} | {linear}", sizes

    return notation


def _nothing(whole, part, whole_at: int, part_at: int) -> str:
    """An empty slice: not split."""
    lines = {
        at: " ".join(f"{c}{i}!" for i in range(len(s))) for at, s, c in ((whole_at, whole, "x"), (part_at, part, "r"))
    }
    return f"{', '.join(lines[i] for i in sorted(lines) if i >= 0)} -> {lines.get(-1, lines[whole_at])}"


def _select_rule(dim_at: int, whole_at: int):
    def notation(node: Call) -> str:
        dims = names((node if whole_at < 0 else node.args[0]).meta["val"].shape)
        at = node.args[dim_at] % len(dims)
        selected = " ".join(dims[:at] + dims[at + 1 :])
        dims[at] = "x*"
        whole = " ".join(dims)
        if whole_at < 0:
            return f"{selected} -> {whole} | ~0"
        return f"{whole} -> {selected} | ~0" if dim_at == 1 else f"{whole}, {selected} -> {whole} | ~01"

    return notation


rules(
    {
        aten.slice.Tensor: _slice_rule(whole_at=0, part_at=-1),
        aten.slice_backward.default: _slice_rule(whole_at=-1, part_at=0),
        aten.slice_scatter.default: _slice_rule(whole_at=0, part_at=1),
        aten.select.int: _select_rule(1, whole_at=0),
        aten.select_backward.default: _select_rule(2, whole_at=-1),
        aten.select_scatter.default: _select_rule(2, whole_at=0),
    }
)


def _strided(dim_at: int, resized=None):
    """Arguments for a slice of every n-th row, which ends where a rank's part ends.

    dim_at: position of dim, start, end and step among the arguments.
    """

    def arguments(args: tuple, shapes) -> tuple:
        args = resized(args, shapes) if resized else args
        if len(args) <= dim_at + 3 or args[dim_at + 3] == 1:
            return args
        dim, start, _, step = args[dim_at : dim_at + 4]
        whole, part = _sizes(args, shapes, dim, dim_at)
        if part * step != whole:
            return args
        return (*args[:dim_at], dim, (start or 0) % step, sys.maxsize, step)

    return arguments


def _sizes(args: tuple, shapes, dim: int, dim_at: int) -> tuple[int, int]:
    """Return the local sizes of the sliced dim in the tensor and in its slice."""
    if dim_at == 1:
        return args[0].meta["val"].shape[dim], shapes[0][dim]
    part = args[0] if isinstance(args[1], list) else args[1]
    return shapes[0][dim], part.meta["val"].shape[dim]


ARGUMENTS |= {
    aten.slice.Tensor: _strided(1),
    aten.slice_backward.default: _strided(2, output_shape(1)),
    aten.slice_scatter.default: _strided(2),
    aten.select_backward.default: output_shape(1),
}


def _slice(here, x, dim=0, start=None, end=None, step=1):
    size = x.shape[dim] * here.parts("x") * here.parts("y") * here.parts("z")
    first, last, at, length = rows_of(size, here.whole_shape(0)[dim], start, step).of(here)
    own = aten.slice(x, dim, at, at + (last - first) * step, step) if last > first else x.narrow(dim, 0, 0)
    pads = [0, 0] * (x.ndim - dim % x.ndim)
    pads[-2:] = first, length - last
    return aten.constant_pad_nd(own, pads)


def _slice_backward(here, grad, sizes, dim, start, end, step):
    rows = rows_of(sizes[dim], grad.shape[dim] * here.parts("z"), start, step)
    return _into(here, grad.new_zeros(here.output_shape(0)), grad, dim, rows)


def _slice_scatter(here, x, source, dim=0, start=None, end=None, step=1):
    rows = rows_of(here.whole_shape(0)[dim], source.shape[dim] * here.parts("z"), start, step)
    return _into(here, x, source, dim, rows)


def _into(here, x, source, dim: int, rows: Rows):
    """x with this rank's rows of a slice written into it. Even without any, `source` is read, because a source that no
    operator reads is not sent to this rank, and the other ranks would wait."""
    first, last, at, _ = rows.of(here)
    if last == first:
        return aten.slice_scatter(x, source.narrow(dim, 0, 0), dim, 0, 0)
    own = source.narrow(dim, first, last - first)
    return aten.slice_scatter(x, own, dim, at, at + (last - first - 1) * rows.step + 1, rows.step)


def _own_index(here, index: int) -> int | None:
    """The index counted from this rank's first row, or None if another rank has it."""
    index = index if index >= 0 else index + here.size("x") * here.parts("x")
    index -= here.offset("x")
    return index if 0 <= index < here.size("x") else None


def _select(here, x, dim, index):
    own = _own_index(here, index)
    return x.new_zeros(here.output_shape(0)) if own is None else aten.select(x, dim, own).clone()


def _select_backward(here, grad, sizes, dim, index):
    own = _own_index(here, index)
    zeros = grad.new_zeros(here.output_shape(0))
    return zeros if own is None else aten.select_scatter(zeros, grad, dim, own)


def _select_scatter(here, x, source, dim, index):
    size = here.size("x") * here.parts("x")
    return _into(here, x, source.unsqueeze(dim), dim, Rows(size, index % size, 1, 1))


LOCAL |= {
    aten.slice.Tensor: _slice,
    aten.slice_backward.default: _slice_backward,
    aten.slice_scatter.default: _slice_scatter,
    aten.select.int: _select,
    aten.select_backward.default: _select_backward,
    aten.select_scatter.default: _select_scatter,
}
