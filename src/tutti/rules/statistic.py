"""Variances, norms, log-sum-exps and histograms, also over split dims: only the result's size travels."""

from __future__ import annotations

from math import inf, prod
from string import ascii_lowercase

import torch
from torch import Tensor

from tutti.graph.step_graph import Call
from tutti.rules.reduction import over_ranks, reduced_dims, reduction, sends, wide
from tutti.rules.registry import CONTIGUOUS, LOCAL, SENDS, named, operands, rules

aten = torch.ops.aten
VARIANCES = (aten.var.correction, aten.std.correction)
MOMENTS = (aten.var_mean.correction, aten.std_mean.correction)
WEIGHT_NORM = (aten._weight_norm_interface.default, aten._weight_norm_interface_backward.default)
NORMS = (aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim, aten.norm.Scalar)


def _histogram(node: Call) -> str | None:
    """Bins of a given range: each part is counted by itself."""
    given = named(node.target, node.args, node.kwargs)
    if given["min"] >= given["max"]:  # the range is that of the data
        return None
    return f"{' '.join(ascii_lowercase[: len(node.args[0].meta['val'].shape)])} -> Z!"


def _weight_norm(node: Call) -> str:
    """A direction and a length for each row, along the first dim or the last: what a row is made of stays whole."""
    dim = named(node.target, node.args, node.kwargs)["dim"]
    tensors = [n.meta["val"].shape for n in operands(node)]
    rank = len(tensors[0])
    rows, ones = [f"{c}!" for c in ascii_lowercase[:rank]], ["1"] * rank
    rows[dim] = ones[dim] = "r"
    lines = [" ".join(ones if prod(s) == s[dim] and s != tensors[0] else rows) for s in tensors]
    linear = " | ~0" if node.target is WEIGHT_NORM[1] else ""
    return f"{', '.join(lines)} -> {' '.join(rows)}, {' '.join(ones)}{linear}"


rules(
    dict.fromkeys(WEIGHT_NORM, _weight_norm)
    | dict.fromkeys((*VARIANCES, *NORMS, aten.logsumexp.default), reduction(mark="@"))
    | dict.fromkeys(MOMENTS, reduction(mark="@", outputs=2))
    | {aten.histc.default: _histogram}
)


def _moments(here, x: Tensor, given: dict) -> tuple[Tensor, Tensor]:
    """Variance and mean, dims kept. The mean first, then squares of what differs from it."""
    dims = reduced_dims(given["dim"], x.ndim)
    count = prod(x.shape[d] * here.parts(ascii_lowercase[d]) for d in dims)
    mean = over_ranks(here, x.sum(dims, keepdim=True), dims, "sum") / count
    squares = over_ranks(here, (x - mean).square().sum(dims, keepdim=True), dims, "sum")
    correction = 1 if given["correction"] is None else given["correction"]
    return squares / max(0, count - correction), mean


def _shaped(x: Tensor, given: dict, rank: int, dtype: torch.dtype) -> Tensor:
    x = x if given["keepdim"] else x.squeeze(reduced_dims(given["dim"], rank))
    return x.to(dtype)


def _variance(target):
    def local(here, x, *args, **kwargs):
        given = named(target, (x, *args), kwargs)
        variance, mean = _moments(here, wide(x), given)
        if target in (aten.std.correction, aten.std_mean.correction):
            variance = variance.sqrt()
        variance = _shaped(variance, given, x.ndim, x.dtype)
        return (variance, _shaped(mean, given, x.ndim, x.dtype)) if target in MOMENTS else variance

    return local


def _norm(target):
    def local(here, x, *args, **kwargs):
        given = named(target, (x, *args), kwargs)
        order = given["ord"] if "ord" in given else given["p"]
        order = 2 if order is None else order
        dims = reduced_dims(given.get("dim"), x.ndim)
        own = target(wide(x), *args, **kwargs)
        if abs(order) == inf:
            return over_ranks(here, own, dims, "max" if order > 0 else "min").to(x.dtype)
        if order in (0, 1):
            return over_ranks(here, own, dims, "sum").to(x.dtype)
        return over_ranks(here, own**order, dims, "sum").pow(1 / order).to(x.dtype)

    return local


def _logsumexp(here, x, dim, keepdim=False):
    dims = reduced_dims(dim, x.ndim)
    top = over_ranks(here, wide(x).amax(dims, keepdim=True), dims, "max")
    top = torch.where(top.abs() == inf, 0, top)
    total = over_ranks(here, (x - top).exp().sum(dims, keepdim=True), dims, "sum").log() + top
    return _shaped(total, {"dim": dim, "keepdim": keepdim}, x.ndim, x.dtype)


LOCAL |= {target: _variance(target) for target in (*VARIANCES, *MOMENTS)}
LOCAL |= {target: _norm(target) for target in NORMS}
LOCAL[aten.logsumexp.default] = _logsumexp

CONTIGUOUS |= {WEIGHT_NORM[0]: (0, 1), WEIGHT_NORM[1]: (0, 1, 2, 3)}

SENDS |= dict.fromkeys((*VARIANCES, aten.logsumexp.default), sends("all_reduce", 2))
SENDS |= dict.fromkeys((*MOMENTS, *NORMS), sends("all_reduce"))
