"""Rolling a split dim: a rank's rows come from one or two other ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.ir.op_info import LOCAL, SENDS
from tutti.ir.step_graph import Call
from tutti.ops.registry import Cut, rules
from tutti.ops.view import letters

aten = torch.ops.aten


def _roll(node: Call) -> str:
    dims = letters(node)
    rolled = _shifts(node.args)
    if not rolled:  # of the flattened tensor
        dims = [f"{c}!" for c in dims if c != "1"]
        line = " ".join("1" if n == 1 else dims.pop(0) for n in node.args[0].meta["val"].shape)
        return f"{line} -> {line} | ~0"
    for dim in {dim % len(dims) for dim, _ in rolled}:
        dims[dim] = f"z{dim}*"
    return f"{' '.join(dims)} -> {' '.join(dims)} | ~0"


def _shifts(args: tuple) -> list[tuple[int, int]]:
    """(dim, shift) of each roll."""
    shifts, dims = args[1], args[2] if len(args) > 2 else []
    return list(zip(dims, shifts, strict=True)) if dims else []


rules({aten.roll.default: _roll})


def _hops(by: int, size: int, parts: int) -> list[tuple[int, int]]:
    """The sources of a part's rows, in order: (number of parts before it, number of rows: its last rows, or for the
    second source its first rows)."""
    n = size // parts
    hop, rows = divmod(by % size, n)
    return [((hop + 1) % parts, rows), (hop % parts, n - rows)]


def _roll_rows(here, x: Tensor, factor: str, dim: int, by: int) -> Tensor:
    n, parts = x.shape[dim], here.parts(factor)
    (far, tail), (near, head) = _hops(by, n * parts, parts)
    rows = [(far, x.narrow(dim, n - tail, tail)), (near, x.narrow(dim, 0, head))]
    pieces = [here.ppermute(r, factor, hop, None) if hop else r for hop, r in rows if r.shape[dim]]
    return torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0]


def _roll_own(here, x, shifts, dims=()):
    for dim, by in _shifts((x, shifts, dims)):
        factor = f"z{dim % x.ndim}"
        x = _roll_rows(here, x, factor, dim % x.ndim, by) if here.axes(factor) else aten.roll(x, [by], [dim])
    return x


def _sends(cut: Cut) -> list[tuple[str, int]]:
    x, dim = cut.inputs[0], cut.dim(0)
    row = x.bytes // x.shape[dim]
    sent = []
    for at, by in _shifts(cut.node.args):
        if at % len(x.shape) == dim:
            size = x.shape[dim] * cut.k
            sent += [("ppermute", rows * row) for hop, rows in _hops(by, size, cut.k) if hop and rows]
    return sent


LOCAL[aten.roll.default] = _roll_own
SENDS[aten.roll.default] = _sends
