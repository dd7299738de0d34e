"""Rotary position embedding (Su et al., "RoFormer", 2021), in the form that rotates halves.

    y = x cos + (-x2, x1) sin,    (x1, x2) = the halves of x
      = (x1 c1 - x2 s1, x2 c2 + x1 s2),    which compilers write in place, half by half

`tutti::rotary` is (x, cos, sin) -> y; x (..., d) with d even, cos and sin broadcastable to x and equal to it in the
last dim. Its backward pass rotates back and needs neither x nor y: gx = (g1 c1 + g2 s2, g2 c2 - g1 s1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.nn.dense import register
from tutti.nn.once import differentiable_once

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define("rotary(Tensor x, Tensor cos, Tensor sin) -> Tensor")
_library.define("rotary_backward(Tensor grad, Tensor cos, Tensor sin) -> Tensor")
ops = torch.ops.tutti


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (..., d), rotated; differentiable in x only. Raises ValueError if d is odd, if the shapes do not fit, or if cos
    or sin require a gradient."""
    fits = cos.shape == sin.shape and cos.ndim <= x.ndim and cos.shape[-1:] == x.shape[-1:]
    pairs = zip(reversed(cos.shape), reversed(x.shape), strict=False)
    if not fits or x.shape[-1] % 2 or any(a not in (1, b) for a, b in pairs):
        raise ValueError(
            f"rotary: cos {tuple(cos.shape)} and sin {tuple(sin.shape)} for x {tuple(x.shape)}: expected x (..., d) "
            "with d even, and cos and sin of one shape that broadcasts to x and ends in d"
        )
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise ValueError("rotary: cos and sin get no gradients: detach them, or use plain operators")
    return ops.rotary(x, cos, sin)


def forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The operator in plain ATen."""
    (x1, x2), (c1, c2), (s1, s2) = (t.chunk(2, -1) for t in (x, cos, sin))
    return torch.cat((x1 * c1 - x2 * s1, x2 * c2 + x1 * s2), -1)


def backward(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Its gradient in plain ATen."""
    (g1, g2), (c1, c2), (s1, s2) = (t.chunk(2, -1) for t in (grad, cos, sin))
    return torch.cat((g1 * c1 + g2 * s2, g2 * c2 - g1 * s1), -1)


register(_library, "rotary", forward)
register(_library, "rotary_backward", backward)
differentiable_once("rotary", "rotary_backward")


def _save(ctx, inputs, output) -> None:
    x, *angles = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(*angles)


def _gradients(ctx, grad):
    return ops.rotary_backward(grad, *ctx.saved_tensors).to(ctx.dtype), None, None


torch.library.register_autograd("tutti::rotary", _gradients, setup_context=_save)
