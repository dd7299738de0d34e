"""Softmax and log-softmax, also over a split dim, with communication of one number per row."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from tutti.ir.op_info import LOCAL, SENDS, UNEVEN
from tutti.ir.step_graph import Call
from tutti.ops.reductions.reduction import wide
from tutti.ops.registry import Cut, operands, rules
from tutti.ops.view import letters

aten = torch.ops.aten


def _over_dim(dim_argument: int, linear: str = ""):
    def notation(node: Call) -> str | None:
        dims = letters(node)
        if not dims:
            return None
        dims[node.args[dim_argument] % len(dims)] = "v@"
        line = " ".join(dims)
        return f"{', '.join([line] * len(operands(node)))} -> {line}{linear}"

    return notation


rules(
    {
        aten._softmax.default: _over_dim(1),
        aten._log_softmax.default: _over_dim(1),
        aten._safe_softmax.default: _over_dim(1),
        aten._softmax_backward_data.default: _over_dim(2, " | ~0"),
        aten._log_softmax_backward_data.default: _over_dim(2, " | ~0"),
    }
)


def _normalizer(here, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Row maximum, and row sum of exp(x - maximum), over the full split dim."""
    top = here.all_reduce(x.amax(dim, keepdim=True), "v", "max")
    return top, here.all_reduce((x - top).exp().sum(dim, keepdim=True), "v", "sum")


def _softmax(here, x, dim, half_to_float):
    x = wide(x)
    top, total = _normalizer(here, x, dim)
    return (x - top).exp() / total


def _log_softmax(here, x, dim, half_to_float):
    x = wide(x)
    top, total = _normalizer(here, x, dim)
    return x - top - total.log()


def _safe_softmax(here, x, dim, dtype=None):
    """Zeros for a fully masked row."""
    x = wide(x if dtype is None else x.to(dtype))
    top = here.all_reduce(x.amax(dim, keepdim=True), "v", "max")
    powers = (x - torch.where(top == -inf, 0, top)).exp()
    total = here.all_reduce(powers.sum(dim, keepdim=True), "v", "sum")
    return powers / torch.where(total == 0, 1, total)


def _softmax_backward(here, grad, output, dim, dtype):
    product = wide(grad) * wide(output)
    return product - wide(output) * here.all_reduce(product.sum(dim, keepdim=True), "v", "sum")


def _log_softmax_backward(here, grad, output, dim, dtype):
    grad, output = wide(grad), wide(output)
    return grad - output.exp() * here.all_reduce(grad.sum(dim, keepdim=True), "v", "sum")


LOCAL |= {
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _log_softmax,
    aten._safe_softmax.default: _safe_softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
}


def _row_sums(count: int):
    """All-reduces of one number per row."""

    def sends(cut: Cut) -> list[tuple[str, int]]:
        x = cut.inputs[0]
        rows = x.numel // x.shape[cut.dim(0)]
        return [("all_reduce", rows * max(4, x.dtype.itemsize))] * count

    return sends


SENDS |= {
    aten._softmax.default: _row_sums(2),
    aten._log_softmax.default: _row_sums(2),
    aten._safe_softmax.default: _row_sums(2),
    aten._softmax_backward_data.default: _row_sums(1),
    aten._log_softmax_backward_data.default: _row_sums(1),
}

UNEVEN |= dict.fromkeys(
    (
        aten._softmax.default,
        aten._log_softmax.default,
        aten._safe_softmax.default,
        aten._softmax_backward_data.default,
        aten._log_softmax_backward_data.default,
    ),
    True,
)
