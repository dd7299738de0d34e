"""Functions as models write them, and the operators that replace them."""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.graph.patterns import Pattern
from tutti.nn.rms_norm import rms_norm, rms_norm_and_input

aten = torch.ops.aten


def _llama_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    full = x.to(torch.float32)
    normal = full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normal.to(x.dtype)


PATTERNS: tuple[Pattern, ...] = (
    Pattern("RMS norm", "tutti::rms_norm", _llama_norm, rms_norm,
            ((2, 4, 6), (6,)), aten.rsqrt.default, learned=(0, 1), reused=0, reusing=rms_norm_and_input, numbers=1),
)  # fmt: skip
