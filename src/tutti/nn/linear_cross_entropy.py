"""A linear layer and the cross-entropy of its results, which are never in memory as a whole.

    logits = hidden weight^T + bias,    loss of a row = log sum_v exp(logits[v]) - logits[label]

`tutti::linear_logsumexp` is (hidden, weight, bias, labels) -> (lse, picked): of each row the logarithm of the sum, and
the logit of its label, 0 where the label is negative. `tutti::linear_logsumexp_backward` makes the logits anew; what is
not wanted of its three gradients is None. `tutti::linear_logsumexp_with_gradients` is both in one, and makes them once:
for where the gradients of its results are known before these are, as those of a mean are.

| operand | shape | |
|---|---|---|
| hidden | (t, h) | rows |
| weight | (v, h) | of the dtype of hidden |
| bias | (v) or none | |
| labels | (t) int64 | below v |
| lse, picked | (t) | float32 at least |

The two go over the vocabulary in blocks: a block's rows of the gradient of the weight are one product. Both in one go
over rows, all of whose logits have to be there, and add products in float32. Logits are rounded to the dtype of hidden,
as a linear layer's results are; all that follows is made in float32 at least. Blocks over rows, and gradients that are
made with the loss: Hsu et al., "Liger kernel" (2024).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

# Bytes of a block's logits. Blocks that fit the cache of a CPU take half as long again: their products are too narrow.
BLOCK = {"cpu": 32 << 20, "cuda": 1 << 28}
FEWEST = 256  # of the vocabulary, or rows, in a block

_library = torch.library.Library("tutti", "FRAGMENT")
_operands = "Tensor hidden, Tensor weight, Tensor? bias, Tensor labels"
_library.define(f"linear_logsumexp({_operands}) -> (Tensor, Tensor)")
_library.define(
    f"linear_logsumexp_backward(Tensor grad_lse, Tensor grad_picked, {_operands}, Tensor lse, bool[3] wanted) "
    "-> (Tensor, Tensor, Tensor)"
)
_library.define(
    f"linear_logsumexp_with_gradients(Tensor grad_lse, Tensor grad_picked, {_operands}, bool[3] wanted) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
ops = torch.ops.tutti


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """What `F.cross_entropy(F.linear(hidden, weight, bias).float(), labels, ...)` is, for class labels.

    hidden (..., h), labels (...), reduction "mean", "sum" or "none". Raises ValueError where shapes do not fit.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"linear_cross_entropy: no reduction {reduction!r}; there are mean, sum, none")
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1:] != weight.shape[1:]:
        raise ValueError(
            f"linear_cross_entropy: hidden (..., h), weight (v, h) and labels (...), not {tuple(hidden.shape)}, "
            f"{tuple(weight.shape)} and {tuple(labels.shape)}"
        )
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    rows = labels.reshape(-1).long()
    kept = rows != ignore_index
    known = torch.where(kept, torch.where(rows < 0, len(weight), rows), -1)  # no class: below 0 are those left out
    lse, picked = ops.linear_logsumexp(hidden.reshape(-1, hidden.shape[-1]), weight, bias, known)
    loss = torch.where(kept, lse - picked, 0)
    if reduction == "none":
        return loss.reshape(labels.shape)
    return loss.sum() / kept.sum() if reduction == "mean" else loss.sum()


def forward(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The operator."""
    _check_labels(labels, weight)
    lse, picked = _rows(hidden, -torch.inf), _rows(hidden, 0.0)
    for block in _blocks(len(weight), len(hidden), hidden.device):
        logits = _logits(hidden, weight, bias, block)
        lse = torch.logaddexp(lse, logits.logsumexp(1))
        picked = _picked(logits, *_columns(labels, block), picked)
    return lse, picked


def backward(
    grad_lse: Tensor,
    grad_picked: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    lse: Tensor,
    wanted: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Its gradients; that of a logit is softmax times grad_lse, and grad_picked more where it is the label's."""
    gh = hidden.new_zeros(hidden.shape, dtype=lse.dtype) if wanted[0] else None
    gw = weight.new_empty(weight.shape) if wanted[1] else None
    gb = bias.new_empty(bias.shape) if bias is not None and wanted[2] else None
    for block in _blocks(len(weight), len(hidden), hidden.device):
        logits = _logits(hidden, weight, bias, block)
        short = _grad_of_logits(logits, lse, grad_lse, grad_picked, *_columns(labels, block)).to(hidden.dtype)
        if gh is not None:
            part = weight[block]
            gh = gh.addmm_(short, part) if gh.dtype == part.dtype else gh.add_(short @ part)
        if gw is not None:
            gw[block] = short.t() @ hidden
        if gb is not None:
            gb[block] = short.sum(0)
    return None if gh is None else gh.to(hidden.dtype), gw, gb


def with_gradients(
    grad_lse: Tensor,
    grad_picked: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """lse, picked, and the gradients of hidden, weight and bias."""
    _check_labels(labels, weight)
    lse, picked = _rows(hidden, -torch.inf), _rows(hidden, 0.0)
    gh = hidden.new_empty(hidden.shape) if wanted[0] else None
    gw = weight.new_zeros(weight.shape, dtype=lse.dtype) if wanted[1] else None
    gb = bias.new_zeros(bias.shape, dtype=lse.dtype) if bias is not None and wanted[2] else None
    whole = slice(0, len(weight))
    for rows in _blocks(len(hidden), len(weight), hidden.device):
        logits = _logits(hidden[rows], weight, bias, whole)
        lse[rows] = logits.logsumexp(1)
        columns = _columns(labels[rows], whole)
        picked[rows] = _picked(logits, *columns, picked[rows])
        short = _grad_of_logits(logits, lse[rows], grad_lse[rows], grad_picked[rows], *columns).to(hidden.dtype)
        if gh is not None:
            torch.mm(short, weight, out=gh[rows])
        if gw is not None:
            part = hidden[rows]
            gw = gw.addmm_(short.t(), part) if gw.dtype == part.dtype else gw.add_(short.t() @ part)
        if gb is not None:
            gb += short.sum(0)
    return lse, picked, gh, None if gw is None else gw.to(weight.dtype), None if gb is None else gb.to(weight.dtype)


def _picked(logits: Tensor, column: Tensor, here: Tensor, otherwise: Tensor) -> Tensor:
    """Of each row the logit of its label, where that is in the block."""
    return torch.where(here, logits.gather(1, column.unsqueeze(1)).squeeze(1), otherwise)


def _grad_of_logits(
    logits: Tensor, lse: Tensor, grad_lse: Tensor, grad_picked: Tensor, column: Tensor, here: Tensor
) -> Tensor:
    """In the place of the logits. column: of the label in these; here: whether it is there."""
    grad = logits.sub_(lse.unsqueeze(1)).exp_().mul_(grad_lse.unsqueeze(1))
    return grad.scatter_add_(1, column.unsqueeze(1), torch.where(here, grad_picked, 0).unsqueeze(1))


def _check_labels(labels: Tensor, weight: Tensor) -> None:
    """IndexError for a label that is v or more, where a CPU sees it."""
    if labels.device.type == "cpu" and labels.numel() and int(labels.max()) >= len(weight):
        raise IndexError(f"label {int(labels.max())} of {len(weight)} classes")


def _blocks(count: int, across: int, device: torch.device) -> Iterator[slice]:
    """Of so many, each of which has so many logits across."""
    width = max(FEWEST, BLOCK[device.type] // (4 * max(1, across)))
    for start in range(0, count, width):
        yield slice(start, min(start + width, count))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, block: slice) -> Tensor:
    logits = F.linear(hidden, weight[block], None if bias is None else bias[block])
    return logits if logits.dtype == torch.float64 else logits.float()


def _columns(labels: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """Of each label its column in the block, and whether it is there."""
    return (labels - block.start).clamp(0, block.stop - block.start - 1), (labels >= block.start) & (
        labels < block.stop
    )


def _rows(hidden: Tensor, value: float) -> Tensor:
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    return torch.full(hidden.shape[:1], value, dtype=dtype, device=hidden.device)


def _fake(hidden, weight, bias, labels):
    return _rows(hidden, 0.0), _rows(hidden, 0.0)


def _fake_backward(grad_lse, grad_picked, hidden, weight, bias, labels, lse, wanted):
    given = zip((hidden, weight, bias), wanted, strict=True)
    return tuple(x.new_empty(x.shape) if x is not None and want else None for x, want in given)


def _fake_with_gradients(grad_lse, grad_picked, hidden, weight, bias, labels, wanted):
    lse, picked = _fake(hidden, weight, bias, labels)
    return lse, picked, *_fake_backward(grad_lse, grad_picked, hidden, weight, bias, labels, lse, wanted)


for _name, _run, _like in (
    ("linear_logsumexp", forward, _fake),
    ("linear_logsumexp_backward", backward, _fake_backward),
    ("linear_logsumexp_with_gradients", with_gradients, _fake_with_gradients),
):
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _run, _device)
    torch.library.register_fake(f"tutti::{_name}", _like)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs, output[0])


def _gradients(ctx, grad_lse, grad_picked):
    *operands, lse = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:3])
    return *ops.linear_logsumexp_backward(grad_lse, grad_picked, *operands, lse, wanted), None


torch.library.register_autograd("tutti::linear_logsumexp", _gradients, setup_context=_save)
