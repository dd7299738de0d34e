"""Root-mean-square norm of the last dim (Zhang and Sennrich, "Root mean square layer normalization", 2019).

    rstd = (mean(x^2) + eps)^(-1/2)
    y = weight * (x rstd)                        the product in the dtype of x (Llama, Qwen, T5)
    y = (offset + weight) * (x rstd), cast       the product in float32, where `wide` (Gemma with offset 1, torch.nn)

`tutti::rms_norm` is (x, weight) -> (y, rstd); x (..., h), weight (h) or none, rstd (..., 1) in float32 or wider, which
is all that the backward pass needs besides the operands. `tutti::rms_norm_backward` is (grad, x, weight, rstd) -> (grad
of x, grad of weight), None if not wanted. `added` is another gradient of x, for instance of a residual stream that is
read again after its norm; it is added as autograd does.

The formulas equal what models write, operator by operator, bit for bit, except the gradient of x in T5's form in low
precision, which autograd rounds in two parts before adding them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.nn.dense import register
from tutti.nn.once import differentiable_once

_library = torch.library.Library("tutti", "FRAGMENT")
_options = "float offset, bool wide"
_library.define(f"rms_norm(Tensor x, Tensor? weight, float eps, {_options}) -> (Tensor, Tensor)")
_library.define(
    f"rms_norm_backward(Tensor grad, Tensor x, Tensor? weight, Tensor rstd, {_options}, bool[2] wanted, "
    "Tensor? added=None) -> (Tensor, Tensor)"
)
ops = torch.ops.tutti


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, wide: bool = False) -> Tensor:
    """The norm of x (..., h) with weight (h) or None, differentiable in both. Raises ValueError if the weight has
    another size, and for an offset without `wide`."""
    _check(x, weight, offset, wide)
    return ops.rms_norm(x, weight, eps, offset, wide)[0]


def rms_norm_and_input(
    x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, wide: bool = False
) -> tuple[Tensor, Tensor]:
    """The norm, and x for another reader: the norm's backward pass adds both gradients. Raises ValueError as `rms_norm`
    does."""
    _check(x, weight, offset, wide)
    return _AndInput.apply(x, weight, eps, offset, wide)  # pyright: ignore[reportReturnType]


def _check(x: Tensor, weight: Tensor | None, offset: float, wide: bool) -> None:
    if offset and not wide:
        raise ValueError(f"rms_norm: offset={offset} needs wide=True: it is added to the weight in float32")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: weight {tuple(weight.shape)} for x {tuple(x.shape)}; it must be {tuple(x.shape[-1:])}"
        )


def forward(x: Tensor, weight: Tensor | None, eps: float, offset: float, wide: bool) -> tuple[Tensor, Tensor]:
    """The operator in plain ATen."""
    full = _full(x)
    rstd = torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + eps)
    normal = full * rstd
    if weight is None:
        return normal.to(x.dtype), rstd
    return (normal * _scale(weight, offset, full.dtype)).to(x.dtype) if wide else weight * normal.to(x.dtype), rstd


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    wide: bool,
    wanted: list[bool],
    added: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Its gradients in plain ATen: g rstd - x rstd^3 mean(g x) for x, with g the gradient of the normalized x."""
    full = _full(x)
    grad = grad.to(full.dtype) if wide else grad
    gx = gw = None
    if wanted[0]:
        g = grad
        if weight is not None:
            g = g * _scale(weight, offset, full.dtype) if wide else (g * weight).to(x.dtype)
        g = g.to(full.dtype)
        slope = (g * full).sum(-1, keepdim=True) * -0.5 * rstd.pow(3) / x.shape[-1]
        first, second = g * rstd, slope * (full * 2.0)
        if added is None or x.dtype != full.dtype:
            gx = (first + second).to(x.dtype)
            gx = gx if added is None else added + gx
        else:
            gx = added + first + second
    if weight is not None and wanted[1]:
        normal = full * rstd
        product = grad * (normal if wide else normal.to(x.dtype))
        gw = product.sum(tuple(range(x.ndim - 1)), keepdim=True) if x.ndim > 1 else product
        gw = gw.reshape(weight.shape).to(weight.dtype)
    return gx, gw


def _full(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def _scale(weight: Tensor, offset: float, dtype: torch.dtype) -> Tensor:
    weight = weight.to(dtype)
    return offset + weight if offset else weight


register(_library, "rms_norm", forward)
register(_library, "rms_norm_backward", backward)
differentiable_once("rms_norm", "rms_norm_backward")


def _save(ctx, inputs, output) -> None:
    x, weight, _, ctx.offset, ctx.wide = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx, grad, _):
    x, weight, rstd = ctx.saved_tensors
    wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[1]]
    return *ops.rms_norm_backward(grad, x, weight, rstd, ctx.offset, ctx.wide, wanted), None, None, None


torch.library.register_autograd("tutti::rms_norm", _gradients, setup_context=_save)


class _AndInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, offset, wide):
        y, rstd = ops.rms_norm(x, weight, eps, offset, wide)
        ctx.save_for_backward(x, weight, rstd)
        ctx.options = offset, wide
        return y, x.view_as(x)

    @staticmethod
    def backward(ctx, *grads):
        x, weight, rstd = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:2])
        return *ops.rms_norm_backward(grads[0], x, weight, rstd, *ctx.options, wanted, grads[1]), None, None, None
