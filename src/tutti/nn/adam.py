"""Adam and AdamW as operators, on top of PyTorch's own fused kernels.

Two forms of the same update:

- ``tutti::adam`` is functional. Captured graphs contain it: every tensor but ``step`` and ``lr`` is read element by
  element, so a split of any dim passes through it.
- ``tutti::adam_`` writes in place and takes the parameters of a group in one call. This one runs.

The ``_amsgrad`` variants also store the running maximum of the second moment. ``step`` is a 0-d integer tensor, the
number of this update (1 for the first). ``lr`` is a 0-d floating tensor; on a GPU it is rounded to float32, as
torch.optim does with a tensor learning rate. ``skip`` is a 0-d float32 tensor or None; if it is 1, nothing changes.
``scale``, a 0-d floating tensor, multiplies the gradient. A gradient may have another floating dtype than its
parameter.

With g the gradient (scaled, and negated when ``maximize``), t the step, lambda the weight decay:

    p <- p - lr lambda p                  (decoupled, AdamW)        or  g <- g + lambda p   (Adam)
    m <- beta1 m + (1 - beta1) g
    v <- beta2 v + (1 - beta2) g^2        vmax <- max(vmax, v)      (amsgrad)
    p <- p - lr / (1 - beta1^t) * m / (sqrt(v or vmax) / sqrt(1 - beta2^t) + eps)

Kingma and Ba, "Adam" (2015), algorithm 1; Loshchilov and Hutter, "Decoupled weight decay regularization"
(2019), algorithm 2; Reddi et al., "On the convergence of Adam and beyond" (2018), algorithm 2.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# Elements that are cast or scaled at once, by device: enough for kernels to run at full speed.
PIECE = {"cpu": 1 << 20, "cuda": 1 << 24}

_NUMBERS = "Tensor step, Tensor lr, Tensor? skip=None, Tensor? scale=None"
_HYPER = "float beta1, float beta2, float eps, float weight_decay, bool decoupled, bool maximize"

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define(
    "adam(Tensor param, Tensor grad, Tensor exp_avg, Tensor exp_avg_sq, "
    f"{_NUMBERS}, *, {_HYPER}) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "adam_amsgrad(Tensor param, Tensor grad, Tensor exp_avg, Tensor exp_avg_sq, Tensor max_exp_avg_sq, "
    f"{_NUMBERS}, *, {_HYPER}) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "adam_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    f"{_NUMBERS}, *, {_HYPER}) -> ()"
)
_library.define(
    "adam_amsgrad_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    f"Tensor(d!)[] max_exp_avg_sqs, {_NUMBERS}, *, {_HYPER}) -> ()"
)


def _adam_(params, grads, exp_avgs, exp_avg_sqs, *numbers, **hyper) -> None:
    _apply(params, grads, [exp_avgs, exp_avg_sqs], *numbers, **hyper)


def _adam_amsgrad_(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, *numbers, **hyper) -> None:
    _apply(params, grads, [exp_avgs, exp_avg_sqs, max_exp_avg_sqs], *numbers, **hyper)


def forward(param, grad, exp_avg, exp_avg_sq, step, lr, skip=None, scale=None, *, beta1, beta2, eps, weight_decay,
            decoupled, maximize):  # fmt: skip
    """``tutti::adam`` in plain ATen."""
    return _formula(param, grad, [exp_avg, exp_avg_sq], step, lr, skip, scale, beta1, beta2, eps, weight_decay,
                    decoupled, maximize)  # fmt: skip


def forward_amsgrad(param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, step, lr, skip=None, scale=None, *, beta1, beta2,
                    eps, weight_decay, decoupled, maximize):  # fmt: skip
    """``tutti::adam_amsgrad`` in plain ATen."""
    return _formula(param, grad, [exp_avg, exp_avg_sq, max_exp_avg_sq], step, lr, skip, scale, beta1, beta2, eps,
                    weight_decay, decoupled, maximize)  # fmt: skip


def _formula(param, grad, moments, step, lr, skip, scale, beta1, beta2, eps, weight_decay, decoupled, maximize):
    dtype = torch.promote_types(param.dtype, torch.float32)
    p, m, v, *most = (x.to(dtype) for x in (param, *moments))
    g = grad if scale is None else grad.to(torch.promote_types(grad.dtype, param.dtype)) * scale
    g = g.to(param.dtype).to(dtype)
    g, rate, step = -g if maximize else g, lr.to(torch.float64), step.to(torch.float64)
    if decoupled:
        p = p * (1 - rate * weight_decay).to(dtype)
    elif weight_decay:
        g = g + weight_decay * p
    m = m + (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g * g
    most = [torch.maximum(x, v) for x in most]
    root = (most or [v])[0].sqrt() / (1 - beta2**step).sqrt().to(dtype)
    p = p - (rate / (1 - beta1**step)).to(dtype) * m / (root + eps)
    results = [x.to(param.dtype) for x in (p, m, v, *most)]
    if skip is not None:
        results = [torch.where(skip != 0, old, new) for old, new in zip((param, *moments), results, strict=True)]
    return tuple(results)


def _adam(param, grad, exp_avg, exp_avg_sq, *numbers, **hyper):
    new = [torch.empty_like(t).copy_(t) for t in (param, exp_avg, exp_avg_sq)]
    _apply(new[:1], [grad], [[t] for t in new[1:]], *numbers, **hyper)
    return tuple(new)


def _adam_amsgrad(param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, *numbers, **hyper):
    new = [torch.empty_like(t).copy_(t) for t in (param, exp_avg, exp_avg_sq, max_exp_avg_sq)]
    _apply(new[:1], [grad], [[t] for t in new[1:]], *numbers, **hyper)
    return tuple(new)


def _apply(params, grads, moments, step, lr, skip=None, scale=None, *, beta1, beta2, eps, weight_decay, decoupled,
           maximize) -> None:  # fmt: skip
    if not params or (skip is not None and skip.device.type == "cpu" and skip.item()):
        return
    step = _count(step, params[0].device)
    hyper = dict(beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, decoupled=decoupled, maximize=maximize)
    every = list(zip(params, grads, *moments, strict=True))
    if scale is not None or any(grad.dtype != param.dtype for param, grad, *_ in every):
        pieces = list(_pieces(every, PIECE[params[0].device.type]))
        most = max(sum(row[0].numel() for row in rows) for rows in pieces)
        scratch = {dtype: params[0].new_empty(most, dtype=dtype) for dtype in {param.dtype for param in params}}
        for rows in pieces:
            columns = [list(column) for column in zip(*rows, strict=True)]
            _apply(columns[0], _scaled(rows, scale, scratch), columns[2:], step, lr, skip, **hyper)
        return
    rows = list(zip(params, *moments, strict=True))
    work = [_aligned(row) for row in rows]
    columns = [list(column) for column in zip(*work, strict=True)]
    fused = torch.ops.aten._fused_adamw_ if decoupled else torch.ops.aten._fused_adam_
    rate: Any = lr.item() if lr.device.type == "cpu" else lr.to(torch.float32)
    fused(
        columns[0],
        [_like(grad, row[0]) for grad, row in zip(grads, work, strict=True)],
        columns[1],
        columns[2],
        columns[3] if len(columns) > 3 else [],
        [step] * len(params),
        lr=rate,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=len(columns) > 3,
        maximize=maximize,
        found_inf=None if skip is None else skip.to(params[0].device),
    )
    for row, copy in zip(rows, work, strict=True):
        if copy is not row:
            for target, source in zip(row, copy, strict=True):
                target.copy_(source)


def _scaled(rows: list[tuple[Tensor, ...]], scale: Tensor | None, scratch: dict[torch.dtype, Tensor]) -> list[Tensor]:
    """Gradients in the dtypes of their parameters, rounded once. In scratch memory unless permuted."""
    gradients, begin = [], 0
    for param, grad, *_ in rows:
        place, begin = scratch[param.dtype][begin : begin + param.numel()], begin + param.numel()
        place = place.view(param.shape) if param.is_contiguous() else torch.empty_like(param)
        if scale is not None and grad.dtype == torch.promote_types(grad.dtype, param.dtype):
            torch.mul(grad, scale, out=place)
        elif scale is not None and grad.ndim and grad.device.type != "cpu":  # a CPU would copy the gradient
            _multiply(grad, scale, place)
        else:
            place.copy_(grad)
            if scale is not None:
                place.mul_(scale)
        gradients.append(place)
    return gradients


def _multiply(grad: Tensor, scale: Tensor, out: Tensor) -> None:
    """grad * scale in one pass, in the wider dtype of grad and out: a 0-d scale would not widen the product."""
    wide = torch.promote_types(grad.dtype, out.dtype)
    torch.mul(grad, scale.to(grad.device, wide).view([1] * grad.ndim), out=out)


def _pieces(every: list[tuple[Tensor, ...]], size: int) -> Iterator[list[tuple[Tensor, ...]]]:
    """Rows of at most this many elements together, so that cast gradients need little memory. Large tensors are
    divided, unless they are permuted."""
    piece, count = [], 0
    for row in every:
        cut = row[0].numel() > size and all(t.is_contiguous() for t in row)
        for part in zip(*(t.view(-1).split(size) for t in row), strict=True) if cut else [row]:
            if piece and count + part[0].numel() > size:
                yield piece
                piece, count = [], 0
            piece.append(part)
            count += part[0].numel()
    yield piece


def _count(step: Tensor, device: torch.device) -> Tensor:
    """The CUDA kernel reads the step as float32 from the device of the parameters. A copy there would wait for it."""
    if step.device.type == "cpu":
        return step if device.type == "cpu" else torch.full((), step.item(), dtype=torch.float32, device=device)
    return step.to(device, torch.float32)


def _aligned(row: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A parameter and its moments, copied if necessary to be dense and permuted alike.

    The fused kernels walk memory and ignore strides. Ordinary tensors are returned as they are.
    """
    param = row[0]
    if _is_dense(param) and all(t.stride() == param.stride() for t in row):
        return row
    dense = torch.empty_like(param).copy_(param)
    return (dense, *(_like(t, dense) for t in row[1:]))


def _like(tensor: Tensor, param: Tensor) -> Tensor:
    """``tensor`` in the memory order and dtype of ``param``, copied if necessary."""
    if tensor.dtype == param.dtype:
        same = tensor.stride() == param.stride() or (tensor.is_contiguous() and param.is_contiguous())
        if same:
            return tensor
    return torch.empty_like(param).copy_(tensor)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a block of memory without gaps or overlaps, in any order of the dims."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _fake_adam(param, grad, exp_avg, exp_avg_sq, *numbers, **hyper):
    return torch.empty_like(param), torch.empty_like(exp_avg), torch.empty_like(exp_avg_sq)


def _fake_amsgrad(param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, *numbers, **hyper):
    return tuple(torch.empty_like(t) for t in (param, exp_avg, exp_avg_sq, max_exp_avg_sq))


def _fake_in_place(*args, **hyper) -> None:
    return None


for _name, _run, _fake in (
    ("adam", _adam, _fake_adam),
    ("adam_amsgrad", _adam_amsgrad, _fake_amsgrad),
    ("adam_", _adam_, _fake_in_place),
    ("adam_amsgrad_", _adam_amsgrad_, _fake_in_place),
):
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _run, _device)
    torch.library.register_fake(f"tutti::{_name}", _fake)

_ops = torch.ops.tutti
# functional operator -> in-place operator on lists, number of operands that become lists, which of them are written
IN_PLACE = {
    _ops.adam.default: (_ops.adam_.default, 4, (0, 2, 3)),
    _ops.adam_amsgrad.default: (_ops.adam_amsgrad_.default, 5, (0, 2, 3, 4)),
}
