"""Causal attention between two stripes of a sequence: every k-th token, of which each has as many (Striped Attention,
Brandon et al. 2023).

Query i attends to keys 0 to i; if `strict`, to keys 0 to i - 1, as the keys of a later stripe require. All stripes thus
run one operator of the same shapes. Operands and results are those of
`aten::_scaled_dot_product_flash_attention_for_cpu`: (batch, heads, tokens, width), and the log-sum-exp of each query in
float32, -inf for a query without keys, whose result is 0.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from tutti.nn.once import differentiable_once

aten = torch.ops.aten
FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
ROWS = 2  # the token dim

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define("striped_attention(Tensor q, Tensor k, Tensor v, bool strict, float? scale) -> (Tensor, Tensor)")
_library.define(
    "striped_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool strict, "
    "float? scale) -> (Tensor, Tensor, Tensor)"
)


def _forward(q: Tensor, k: Tensor, v: Tensor, strict: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    if not strict:
        out, lse = FLASH(q, k, v, 0.0, True, scale=scale)
        return out.contiguous(), lse.contiguous()
    out, lse = q.new_zeros((*q.shape[:3], v.shape[3])), q.new_full(q.shape[:3], -inf, dtype=_wide(q))
    if q.shape[ROWS] > 1:
        out[:, :, 1:], lse[:, :, 1:] = FLASH(q[:, :, 1:], k[:, :, :-1], v[:, :, :-1], 0.0, True, scale=scale)
    return out, lse


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, strict: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    if not strict:
        gradients = FLASH_BACKWARD(grad, q, k, v, out, lse.contiguous(), 0.0, True, scale=scale)
        return tuple(g.contiguous() for g in gradients)  # pyright: ignore[reportReturnType]
    gradients = tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    if q.shape[ROWS] > 1:
        grad, q, out, lse = (x[:, :, 1:] for x in (grad, q, out, lse))
        k, v = k[:, :, :-1], v[:, :, :-1]
        gq, gk, gv = FLASH_BACKWARD(grad, q, k, v, out, lse.contiguous(), 0.0, True, scale=scale)
        gradients[0][:, :, 1:], gradients[1][:, :, :-1], gradients[2][:, :, :-1] = gq, gk, gv
    return gradients  # pyright: ignore[reportReturnType]


def _wide(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _fake(q: Tensor, k: Tensor, v: Tensor, strict: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=_wide(q))


_library.impl("striped_attention", _forward, "CPU")
_library.impl("striped_attention_backward", _backward, "CPU")
torch.library.register_fake("tutti::striped_attention", _fake)
torch.library.register_fake(
    "tutti::striped_attention_backward",
    lambda grad, q, k, v, out, lse, strict, scale: tuple(x.new_empty(x.shape) for x in (q, k, v)),
)
differentiable_once("striped_attention", "striped_attention", "striped_attention_backward")
