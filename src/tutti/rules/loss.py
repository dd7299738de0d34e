"""Softmax, log-softmax and negative log-likelihood, also over a split vocabulary: only one number a row travels."""

from __future__ import annotations

from math import prod
from string import ascii_lowercase

import torch

from tutti.graph.step_graph import Call
from tutti.rules.registry import LOCAL, SENDS, Cut, operands, rules

aten = torch.ops.aten
MEAN, SUM = 1, 2  # torch's codes of the reduction


def _over_dim(dim_argument: int, mark: str, linear: str = ""):
    def notation(node: Call) -> str:
        rank = len(operands(node)[0].meta["val"].shape)
        dims = list(ascii_lowercase[:rank])
        dims[node.args[dim_argument] % rank] = f"v{mark}"
        line = " ".join(dims)
        return f"{', '.join([line] * len(operands(node)))} -> {line}{linear}"

    return notation


def _nll_backward(node: Call) -> str | None:
    if len(node.args[1].meta["val"].shape) != 2:  # one sample without a batch
        return None
    grad = " ".join("n" for _ in node.args[0].meta["val"].shape)
    weights = ", c!" if node.args[3] is not None else ""
    return f"{grad}, n c*, n{weights}, -> n c* | ~0"


def _nll_forward(node: Call) -> str | None:
    if node.args[2] is not None or len(node.args[0].meta["val"].shape) != 2:  # class weights, one sample
        return None
    return "n@ c*, n -> , =" if node.args[3] in (MEAN, SUM) else "n c*, n -> n, ="


def _mse(node: Call) -> str:
    letters = " ".join(ascii_lowercase[: len(operands(node)[0].meta["val"].shape)])
    reduction = node.args[2] if len(node.args) > 2 else MEAN
    if reduction not in (MEAN, SUM):
        return f"{letters}, {letters} -> {letters}"
    combine = "avg" if reduction == MEAN else "sum"
    return f"{' '.join(f'{c}:{combine}' for c in letters.split())}, {letters} ->"


def _mse_backward(node: Call) -> str:
    letters = ascii_lowercase[: len(operands(node)[1].meta["val"].shape)]
    line = " ".join(f"{c}@" for c in letters)
    grad = line if operands(node)[0].meta["val"].shape else ""
    return f"{grad}, {line}, {line} -> {line} | ~0"


rules(
    {
        aten.mse_loss.default: _mse,
        aten.mse_loss_backward.default: _mse_backward,
        aten._softmax.default: _over_dim(1, "@"),
        aten._log_softmax.default: _over_dim(1, "@"),
        aten._safe_softmax.default: _over_dim(1, "!"),
        aten._softmax_backward_data.default: _over_dim(2, "@", " | ~0"),
        aten._log_softmax_backward_data.default: _over_dim(2, "@", " | ~0"),
        aten.nll_loss_forward.default: _nll_forward,
        aten.nll_loss_backward.default: _nll_backward,
    }
)


def _normalizer(here, x, dim):
    """Row maximum and row sum of exponentials of x less the maximum, over the whole of the split dim."""
    top = here.all_reduce(x.amax(dim, keepdim=True), "v", "max")
    return top, here.all_reduce((x - top).exp().sum(dim, keepdim=True), "v", "sum")


def _softmax(here, x, dim, half_to_float):
    top, total = _normalizer(here, x.float() if half_to_float else x, dim)
    return (x - top).exp() / total


def _log_softmax(here, x, dim, half_to_float):
    x = x.float() if half_to_float else x
    top, total = _normalizer(here, x, dim)
    return x - top - total.log()


def _softmax_backward(here, grad, output, dim, dtype):
    product = grad * output
    return (product - output * here.all_reduce(product.sum(dim, keepdim=True), "v", "sum")).to(dtype)


def _log_softmax_backward(here, grad, output, dim, dtype):
    return (grad - output.exp() * here.all_reduce(grad.sum(dim, keepdim=True), "v", "sum")).to(dtype)


def _own_targets(here, target, ignore_index):
    """Targets counted from this rank's first class; those of other ranks and the ignored ones become -100."""
    first, classes = here.offset("c"), here.size("c")
    own = (target >= first) & (target < first + classes) & (target != ignore_index)
    return torch.where(own, target - first, -100)


def _nll_loss(here, x, target, weight, reduction, ignore_index):
    added = SUM if reduction == MEAN else reduction
    total, count = aten.nll_loss_forward(x, _own_targets(here, target, ignore_index), None, added, -100)
    count = here.all_reduce(here.all_reduce(count, "c", "sum"), "n", "sum")
    return (total / count if reduction == MEAN else total), count


def _nll_loss_backward(here, grad, x, target, weight, reduction, ignore_index, total_weight):
    own = _own_targets(here, target, ignore_index)
    return aten.nll_loss_backward(grad, x, own, None, reduction, -100, total_weight)


def _mse_loss_backward(here, grad, x, target, reduction):
    """The mean is over the whole, of which this rank has a part."""
    scale = 2 / prod(here.whole_shape(0)) if reduction == MEAN else 2
    return (x - target) * (grad * scale)


LOCAL |= {
    aten.mse_loss_backward.default: _mse_loss_backward,
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _log_softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss_backward.default: _nll_loss_backward,
}


def _row_sums(count: int):
    """All-reduces of one number for each row."""

    def sends(cut: Cut) -> list[tuple[str, int]]:
        x = cut.inputs[0]
        rows = x.numel // x.shape[cut.dim(0)]
        return [("all_reduce", rows * x.dtype.itemsize)] * count

    return sends


SENDS |= {
    aten._softmax.default: _row_sums(2),
    aten._log_softmax.default: _row_sums(2),
    aten._softmax_backward_data.default: _row_sums(1),
    aten._log_softmax_backward_data.default: _row_sums(1),
    aten.nll_loss_forward.default: lambda cut: [("all_reduce", 4)],
}
