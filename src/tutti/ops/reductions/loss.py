"""Losses and their gradients. The mean over equal parts is the mean of their means; its gradient is scaled by the
number of entries of the full tensor."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

import tutti.nn.loss.ctc  # noqa: F401  (registers the operators)
from tutti.ir.op_info import CONTIGUOUS, FLOPS, LOCAL, SENDS, UNEVEN
from tutti.ir.step_graph import Call
from tutti.ops.indexing.rows import own_rows
from tutti.ops.pointwise import broadcast, pointwise
from tutti.ops.registry import Cut, named, operands, rules, shape_of

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2  # torch's codes of the reduction

ENTRYWISE = {  # loss(x, target, ...) -> its gradient(grad, x, target, ...)
    aten.mse_loss.default: aten.mse_loss_backward.default,
    aten.smooth_l1_loss.default: aten.smooth_l1_loss_backward.default,
    aten.huber_loss.default: aten.huber_loss_backward.default,
    aten.soft_margin_loss.default: aten.soft_margin_loss_backward.default,
    aten.binary_cross_entropy.default: aten.binary_cross_entropy_backward.default,
}
ROWWISE = {  # of (rows, classes) and a target for each row
    aten.multi_margin_loss.default: aten.multi_margin_loss_backward.default,
}


def _reduction(node: Call) -> int:
    return named(node.target, node.args, node.kwargs)["reduction"]


def _combined(dims: str, reduction: int) -> str:
    """Dims whose split leaves a mean of means, or a sum of sums."""
    return " ".join(f"{c}:{'avg' if reduction == MEAN else 'sum'}" for c in dims.split())


def _entrywise(node: Call) -> str:
    if _reduction(node) == NONE:
        return pointwise(node) + _weighted(node, 2)
    shape = operands(node)[0].meta["val"].shape
    x, *others = (broadcast(n.meta["val"].shape, shape) for n in operands(node))
    return f"{', '.join([_combined(x, _reduction(node)), *others])} -> {_weighted(node, 2)}"


def _entrywise_backward(node: Call) -> str:
    shape = node.meta["val"].shape
    grad, x, *others = (broadcast(n.meta["val"].shape, shape) for n in operands(node))
    x = " ".join(f"{c}@" for c in x.split()) if _reduction(node) == MEAN else x
    return f"{', '.join([grad, x, *others])} -> {x} | ~0{_weighted(node, 3, '')}"


def _rowwise(node: Call) -> str | None:
    if len(node.args[0].meta["val"].shape) != 2:
        return None
    rows = "n" if _reduction(node) == NONE else _combined("n", _reduction(node))
    return f"{rows} c!, n{_class_weights(node)} -> {'n' if _reduction(node) == NONE else ''}{_weighted(node, 2)}"


def _rowwise_backward(node: Call) -> str | None:
    if len(node.args[1].meta["val"].shape) != 2:
        return None
    rows, grad = ("n@" if _reduction(node) == MEAN else "n"), "n" if node.args[0].meta["val"].shape else ""
    return f"{grad}, {rows} c!, n{_class_weights(node)} -> {rows} c! | ~0{_weighted(node, 3, '')}"


def _weighted(node: Call, operand: int, bar: str = " |") -> str:
    """Linear in the weights, if there are any."""
    return f"{bar} ~{operand}" if named(node.target, node.args, node.kwargs).get("weight") is not None else ""


def _class_weights(node: Call) -> str:
    return ", c" if named(node.target, node.args, node.kwargs)["weight"] is not None else ""


def _nll(node: Call) -> str:
    """(batch, classes, ...) and a class for each position; also one position without a batch."""
    x = ["c*"] if len(node.args[0].meta["val"].shape) == 1 else ["n", "c*", *_positions(node.args[0])]
    at = [c for c in x if c != "c*"]
    if _reduction(node) != NONE:
        x = [c if c == "c*" else f"{c}@" for c in x]
    out = " ".join(at) if _reduction(node) == NONE else ""
    linear = "" if _reduction(node) == MEAN else _weighted(node, 2)  # a mean is divided by the weights
    return f"{' '.join(x)}, {' '.join(at)}{_class_weights(node)} -> {out}, ={linear}"


def _nll_backward(node: Call) -> str:
    x = ["c*"] if len(node.args[1].meta["val"].shape) == 1 else ["n", "c*", *_positions(node.args[1])]
    at = " ".join(c for c in x if c != "c*")
    grad = at if node.args[0].meta["val"].shape else ""
    return f"{grad}, {' '.join(x)}, {at}{_class_weights(node)}, -> {' '.join(x)} | ~0{_weighted(node, 3, '')}"


def _positions(x: Call) -> list[str]:
    return [f"p{i}" for i in range(len(x.meta["val"].shape) - 2)]


rules(
    dict.fromkeys(ENTRYWISE, _entrywise)
    | dict.fromkeys(ENTRYWISE.values(), _entrywise_backward)
    | {aten.binary_cross_entropy_with_logits.default: _entrywise}  # autograd writes its gradient out
    | dict.fromkeys(ROWWISE, _rowwise)
    | dict.fromkeys(ROWWISE.values(), _rowwise_backward)
    | dict.fromkeys((aten.nll_loss_forward.default, aten.nll_loss2d_forward.default), _nll)
    | dict.fromkeys((aten.nll_loss_backward.default, aten.nll_loss2d_backward.default), _nll_backward)
)


def _ctc(node: Call):
    """Sequences can be split if each has its own row of targets."""
    n, targets = _sequences(node.args[1])
    return f"t! {n} c!, {targets}, {n}, {n} -> {n}, {n} t! j!", {}


def _ctc_backward(node: Call):
    n, targets = _sequences(node.args[2])
    return f"{n}, t! {n} c!, {targets}, {n}, {n}, {n}, {n} t! j! -> t! {n} c! | ~0", {}


def _sequences(targets: Call) -> tuple[str, str]:
    return ("n", "n s!") if len(targets.meta["val"].shape) == 2 else ("n!", "s!")


def _multilabel(node: Call) -> str | None:
    """(scores, classes up to the first -1) -> loss, which of the classes are targets"""
    if len(node.args[0].meta["val"].shape) != 2:
        return None
    rows = "n" if _reduction(node) == NONE else _combined("n", _reduction(node))
    return f"{rows} c!, n c! -> {'n' if _reduction(node) == NONE else ''}, n c!"


def _multilabel_backward(node: Call) -> str | None:
    if len(node.args[1].meta["val"].shape) != 2:
        return None
    rows, grad = ("n@" if _reduction(node) == MEAN else "n"), "n" if node.args[0].meta["val"].shape else ""
    return f"{grad}, {rows} c!, n c!, n c! -> {rows} c! | ~0"


MULTILABEL = aten.multilabel_margin_loss_backward.default
rules({aten.multilabel_margin_loss_forward.default: _multilabel, MULTILABEL: _multilabel_backward})
rules({torch.ops.tutti.ctc_loss.default: _ctc, torch.ops.tutti.ctc_loss_backward.default: _ctc_backward})


def _mean_gradient(target, count: Callable[[tuple[int, ...]], int]) -> Callable:
    """The gradient of a mean, from the local gradient of a sum, scaled by the global count."""
    place = [a.name for a in target._schema.arguments].index("reduction")

    def local(here, grad, *args):
        arguments = list(named(target, (grad, *args), {}).values())
        arguments[0], arguments[place] = grad / count(here.whole_shape(0)), SUM
        return target(*arguments)

    return local


LOCAL |= {target: _mean_gradient(target, prod) for target in ENTRYWISE.values()}
LOCAL |= {target: _mean_gradient(target, lambda shape: shape[0]) for target in (*ROWWISE.values(), MULTILABEL)}


def _own_targets(here, target: Tensor, ignore_index: int) -> Tensor:
    """Targets counted from this rank's first class; those of other ranks and the ignored ones become -100. What is no
    class stays as it is, so that torch names it in its error."""
    own, _ = own_rows(here, "c", target, elsewhere=-100, beyond=here.size("c"))
    exists = (target >= 0) & (target < here.whole("c"))
    own = torch.where(exists | (target == -100), own, target)
    return torch.where(target == ignore_index, -100, own)


def _nll_loss(loss) -> Callable:
    def local(here, x, target, weight, reduction, ignore_index):
        added, own = SUM if reduction == MEAN else reduction, _own_targets(here, target, ignore_index)
        total, count = loss(x, own, weight, added, -100)
        if weight is None and reduction != NONE:  # known from the targets, without communication
            count = (own != -100).sum().to(count.dtype)
        for factor in ("c", *(["n"] if x.ndim > 1 else []), *(f"p{i}" for i in range(x.ndim - 2))):
            count = here.all_reduce(count, factor, "sum")
        return (total / count if reduction == MEAN else total), count

    return local


def _nll_loss_backward(gradient) -> Callable:
    def local(here, grad, x, target, weight, reduction, ignore_index, total_weight):
        own = _own_targets(here, target, ignore_index)
        return gradient(grad, x, own, weight, reduction, -100, total_weight)

    return local


def _count_sends(cut: Cut) -> list[tuple[str, int]]:
    return [("all_reduce", cut.outputs[1].bytes)]


CONTIGUOUS[aten.nll_loss2d_forward.default] = (0, 1)
CONTIGUOUS[aten.nll_loss2d_backward.default] = (0, 1, 2)

for _loss in (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default):
    LOCAL[_loss], SENDS[_loss] = _nll_loss(_loss), _count_sends
for _gradient in (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default):
    LOCAL[_gradient] = _nll_loss_backward(_gradient)


def _ctc_flops(passes: int) -> Callable[[Call], int]:
    """A logsumexp of three terms for each state of each step, `passes` times."""

    def flops(node: Call) -> int:
        log_probs, targets = node.args[passes - 1 : passes + 1]  # behind the gradient
        return passes * 8 * prod(shape_of(log_probs)[:2]) * (2 * shape_of(targets)[-1] + 1)

    return flops


FLOPS |= {torch.ops.tutti.ctc_loss.default: _ctc_flops(1), torch.ops.tutti.ctc_loss_backward.default: _ctc_flops(2)}

UNEVEN |= dict.fromkeys(
    (
        *ENTRYWISE.values(),
        *ROWWISE.values(),
        MULTILABEL,
        aten.nll_loss_forward.default,
        aten.nll_loss2d_forward.default,
        aten.nll_loss_backward.default,
        aten.nll_loss2d_backward.default,
    ),
    True,
)
