"""Variances, norms, log-sum-exps and histograms, also over split dims: only results are communicated."""

from __future__ import annotations

from math import inf, prod
from string import ascii_lowercase

import torch
from torch import Tensor

from tutti.ir.op_info import CONTIGUOUS, LOCAL, SENDS
from tutti.ir.spec import Spec
from tutti.ir.step_graph import Call
from tutti.ops.reductions.reduction import over_ranks, reduced_dims, reduction, wide, wide_bytes
from tutti.ops.registry import Cut, named, operands, rules

aten = torch.ops.aten
VARIANCES = (aten.var.correction, aten.std.correction)
MOMENTS = (aten.var_mean.correction, aten.std_mean.correction)
WEIGHT_NORM = (aten._weight_norm_interface.default, aten._weight_norm_interface_backward.default)
NORMS = (aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim, aten.norm.Scalar)


def _histogram(node: Call) -> str | None:
    """Each part is counted separately, if the range of the bins is given."""
    arguments = named(node.target, node.args, node.kwargs)
    if arguments["min"] >= arguments["max"]:  # the range is computed from the data
        return None
    return f"{' '.join(ascii_lowercase[: len(node.args[0].meta['val'].shape)])} -> Z!"


def _weight_norm(node: Call) -> str:
    """A direction and a length for each row, along the first or the last dim. Only rows can be split."""
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


def _moments(here, x: Tensor, arguments: dict) -> tuple[Tensor, Tensor]:
    """Variance and mean with kept dims. The mean is computed first, then the squared deviations from it."""
    dims = reduced_dims(arguments["dim"], x.ndim)
    count = prod(x.shape[d] * here.parts(ascii_lowercase[d]) for d in dims)
    mean = over_ranks(here, x.sum(dims, keepdim=True), dims, "sum") / count
    squares = over_ranks(here, (x - mean).abs().square().sum(dims, keepdim=True), dims, "sum")
    correction = 1 if arguments["correction"] is None else arguments["correction"]
    return squares / max(0, count - correction), mean


def _shaped(x: Tensor, arguments: dict, rank: int) -> Tensor:
    return x if arguments["keepdim"] else x.squeeze(reduced_dims(arguments["dim"], rank))


def _variance(target):
    def local(here, x, *args, **kwargs):
        arguments = named(target, (x, *args), kwargs)
        variance, mean = _moments(here, wide(x), arguments)
        if target in (aten.std.correction, aten.std_mean.correction):
            variance = variance.sqrt()
        variance = _shaped(variance, arguments, x.ndim)
        return (variance, _shaped(mean, arguments, x.ndim)) if target in MOMENTS else variance

    return local


def _norm(target):
    def local(here, x, *args, **kwargs):
        arguments = named(target, (x, *args), kwargs)
        order = arguments["ord"] if "ord" in arguments else arguments["p"]
        order = 2 if order is None else order
        dims = reduced_dims(arguments.get("dim"), x.ndim)
        x = wide(x.to(arguments.get("dtype") or x.dtype))
        own = torch.linalg.vector_norm(x, order, dims or None, arguments.get("keepdim", False))
        if abs(order) == inf:
            return over_ranks(here, own, dims, "max" if order > 0 else "min")
        if order in (0, 1):
            return over_ranks(here, own, dims, "sum")
        return over_ranks(here, own**order, dims, "sum").pow(1 / order)

    return local


def _logsumexp(here, x, dim, keepdim=False):
    dims = reduced_dims(dim, x.ndim)
    x = wide(x)
    top = over_ranks(here, x.real.amax(dims, keepdim=True), dims, "max")
    top = torch.where(top.abs() == inf, 0, top)
    total = over_ranks(here, (x - top).exp().sum(dims, keepdim=True), dims, "sum").log() + top
    return _shaped(total, {"dim": dim, "keepdim": keepdim}, x.ndim)


LOCAL |= {target: _variance(target) for target in (*VARIANCES, *MOMENTS)}
LOCAL |= {target: _norm(target) for target in NORMS}
LOCAL[aten.logsumexp.default] = _logsumexp

CONTIGUOUS |= {WEIGHT_NORM[0]: (0, 1), WEIGHT_NORM[1]: (0, 1, 2, 3)}


def _two_statistics(cut: Cut) -> list[tuple[str, int]]:
    """A mean and a variance, or a sum and a maximum. For complex numbers one of the two is real."""
    rows, dtype = cut.outputs[0].shape, cut.inputs[0].dtype
    return [("all_reduce", wide_bytes(Spec(rows, of))) for of in (dtype, dtype.to_real())]


SENDS |= dict.fromkeys((*VARIANCES, *MOMENTS, aten.logsumexp.default), _two_statistics)
SENDS |= dict.fromkeys(NORMS, lambda cut: [("all_reduce", wide_bytes(cut.outputs[0]))])
