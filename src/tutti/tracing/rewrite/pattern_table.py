"""Functions as models write them, and the fused operators that replace them.

The order matters: the result of one pattern may be part of a later one, such as a GELU in a gated unit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from math import pi, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from tutti.nn.glu import glu
from tutti.nn.loss.linear_cross_entropy import linear_cross_entropy
from tutti.nn.rms_norm import rms_norm, rms_norm_and_input
from tutti.nn.rotary import rotary
from tutti.tracing.rewrite.patterns import Pattern, check_pattern

aten = torch.ops.aten


def _llama_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    full = x.to(torch.float32)
    normal = full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normal.to(x.dtype)


def _t5_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    normal = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + eps)
    return weight * normal.to(weight.dtype)


def _gemma_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    full = x.float()
    normal = full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + eps)
    return (normal * (1.0 + weight.float())).type_as(x)


def _torch_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _plain_norm(x: Tensor, eps: float) -> Tensor:
    full = x.float()
    return (full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + eps)).type_as(x)


def _norm(reference: Callable, **options) -> Pattern:
    return Pattern(
        "RMS norm", "tutti::rms_norm", reference, partial(rms_norm, **options), ((2, 4, 6), (6,)),
        aten.rsqrt.default, learned=(0, 1), reused=0, reusing=partial(rms_norm_and_input, **options), numbers=1,
    )  # fmt: skip


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return (x * cos) + (torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin)


def _gelu_new(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(sqrt(2.0 / pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATED = {"silu": (F.silu, aten.silu.default), "gelu": (F.gelu, aten.gelu.default),
             "gelu_tanh": (_gelu_tanh, aten.gelu.default)}  # fmt: skip


def _gated(name: str) -> Pattern:
    act, anchor = ACTIVATED[name]

    def reference(gate: Tensor, up: Tensor) -> Tensor:
        return act(gate) * up

    return Pattern("gated unit", "tutti::glu", reference, partial(glu, activation=name), ((2, 4, 6), (2, 4, 6)),
                   anchor, learned=(0, 1), together=True)  # fmt: skip


def _linear_loss(dims: int, biased: bool, upcast: str, reduction: str) -> Pattern:
    """upcast: when logits are cast to float32: "early", "late" (after reshaping to rows, as autocast does) or never.
    The replacement then rounds only the loss to their dtype, not its summands."""

    def reference(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None) -> Tensor:
        logits = F.linear(hidden, weight, bias)
        logits = logits.float() if upcast == "early" else logits
        rows = logits.view(-1, logits.shape[-1])
        return F.cross_entropy(rows.float() if upcast == "late" else rows, labels, reduction=reduction)

    def replacement(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None) -> Tensor:
        loss = linear_cross_entropy(hidden.flatten(0, -2), weight, labels, bias, reduction=reduction)
        return loss if upcast else loss.to(hidden.dtype)

    shapes = ((2, 4, 6)[3 - dims :], (5, 6), (8,) if dims == 3 else (4,), *([(5,)] if biased else []))
    return Pattern("linear and cross-entropy", "tutti::linear_logsumexp", reference, replacement, shapes,
                   aten._log_softmax.default, learned=(0, 1, 3) if biased else (0, 1), labels=(2,))  # fmt: skip


PATTERNS: list[Pattern] = [
    _norm(_llama_norm),
    _norm(_t5_norm),
    _norm(_gemma_norm, offset=1.0, wide=True),
    _norm(_torch_norm, wide=True),
    Pattern("RMS norm", "tutti::rms_norm", _plain_norm, lambda x, eps: rms_norm(x, None, eps), ((2, 4, 6),),
            aten.rsqrt.default, learned=(0,), reused=0, numbers=1,
            reusing=lambda x, eps: rms_norm_and_input(x, None, eps)),
    Pattern("rotary embedding", "tutti::rotary", _rotate_halves, rotary, ((2, 3, 4, 6), (1, 1, 4, 6), (1, 1, 4, 6)),
            aten.neg.default, learned=(0,)),
    Pattern("tanh GELU", "aten::gelu", _gelu_new, _gelu_tanh, ((2, 4, 6),), aten.tanh.default, learned=(0,)),
    *(_gated(name) for name in ACTIVATED),
    *(_linear_loss(*options) for options in product((3, 2), (False, True), ("early", "late", ""), ("mean", "sum"))),
]  # fmt: skip


def register_pattern(pattern: Pattern) -> None:
    """Search a pattern in all steps captured from now on, after the patterns that are in the table already.

    Raises ValueError if the reference does not contain the anchor, or if results or gradients of the replacement differ
    from those of the reference on random float32 operands of the example shapes.
    """
    check_pattern(pattern)
    PATTERNS.append(pattern)
