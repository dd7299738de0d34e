"""Matrix products, alone or added to an operand; distances; operators linear in each operand."""

from math import prod
from string import ascii_lowercase

import torch
from torch import fx

import tutti.nn.linear.ordered_mm  # noqa: F401  (registers the operator)
from tutti.ir.op_info import CONTIGUOUS, FLOPS
from tutti.ir.step_graph import Call
from tutti.ops.pointwise import broadcast
from tutti.ops.registry import named, operands, rules, shape_of
from tutti.ops.view import aligned, names

aten = torch.ops.aten


def _added(product: str, out: str):
    """operand + product. The operand is broadcast, and a partial sum if the contracted dim is split."""

    def notation(node: Call) -> str:
        return f"+{aligned(operands(node)[0], out.split())}, {product} -> {out} | ~01 ~02"

    return notation


def _linear(node: Call) -> str:
    rows = " ".join(names(node.args[0].meta["val"].shape)[:-1])
    bias, marks = (", +n", "~02 ~12") if len(operands(node)) > 2 else ("", "~0 ~1")
    return f"{rows} k, n k{bias} -> {rows} n | {marks}"


def _ordered(node: Call) -> str:
    """k cannot be split, and operands cannot be partial sums: see `tutti.nn.linear.ordered_mm`."""
    return ("m n, " if len(operands(node)) > 2 else "") + "m k!, k! n -> m n"


def _trilinear(node: Call) -> str:
    """Three tensors, each without the dims that it is broadcast over, multiplied and summed over some."""
    rank = len(operands(node)[0].meta["val"].shape) + len(node.args[3])
    lines = [
        " ".join(c for i, c in enumerate(ascii_lowercase[:rank]) if i not in missing) for missing in node.args[3:7]
    ]
    return f"{', '.join(lines[:3])} -> {lines[3]} | ~0 ~1 ~2"


def _cross(node: Call) -> str:
    shape = node.meta["val"].shape
    out = list(ascii_lowercase[: len(shape)])
    out[named(node.target, node.args, node.kwargs)["dim"] % len(shape)] = "v!"
    return f"{', '.join(aligned(n, out) for n in operands(node))} -> {' '.join(out)} | ~0 ~1"


def _distances(node: Call) -> str:
    """Distances of n points from m others; batches are broadcast."""
    *batch, _, _ = node.meta["val"].shape
    rows = [broadcast(x.meta["val"].shape[:-2], tuple(batch)) for x in operands(node)]
    return f"{rows[0]} n k!, {rows[1]} m k! -> {' '.join(ascii_lowercase[: len(batch)])} n m"


def _distance_gradient(node: Call) -> str:
    batch = " ".join(names(node.meta["val"].shape[:-2]))
    return f"{batch} n m, {batch} n k, {batch} m k, {batch} n m -> {batch} n k | ~0"


rules(
    {
        aten.mm.default: "m k, k n -> m n | ~0 ~1",
        aten.bmm.default: "b m k, b k n -> b m n | ~0 ~1",
        aten.mv.default: "m k, k -> m | ~0 ~1",
        aten.dot.default: "k, k -> | ~0 ~1",
        aten.vdot.default: "k, k -> | ~0 ~1",
        aten.addmm.default: _added("m k, k n", "m n"),
        aten.baddbmm.default: _added("b m k, b k n", "b m n"),
        aten.addbmm.default: _added("b m k, b k n", "m n"),
        aten.addmv.default: _added("m k, k", "m"),
        aten.addr.default: _added("m, n", "m n"),
        aten.linear.default: _linear,
        torch.ops.tutti.ordered_mm.default: _ordered,
        aten._trilinear.default: _trilinear,
        aten.linalg_cross.default: _cross,
        aten._cdist_forward.default: _distances,
        aten._cdist_backward.default: _distance_gradient,
        aten._euclidean_dist.default: _distances,  # cdist of many points; autograd writes its gradient out
        aten._pdist_forward.default: "n! k! -> p!",  # of each pair of points
        aten._pdist_backward.default: "p!, n! k, p! -> n! k | ~0",
    }
)

CONTIGUOUS[aten._pdist_backward.default] = (0, 1, 2)


def _matmul(node: Call) -> int:
    *_, a, b = (x for x in node.args if isinstance(x, fx.Node))
    return 2 * prod(shape_of(a)) * shape_of(b)[-1]


FLOPS |= dict.fromkeys(
    (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, torch.ops.tutti.ordered_mm.default),
    _matmul,
)
