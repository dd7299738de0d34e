"""Fused operators with formulas in plain ATen, which a compiler can fuse with their neighbours.

Operators that work in blocks, such as `tutti.nn.loss.linear_cross_entropy`, are not included: a compiler calls them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import tutti.nn.loss.linear_cross_entropy  # noqa: F401  (registers the operators)
from tutti.nn import adam, glu, rms_norm, rotary
from tutti.nn.quantized import rounding

ops = torch.ops.tutti

FUSED: dict[torch._ops.OpOverload, Callable] = {
    ops.rms_norm.default: rms_norm.forward,
    ops.rms_norm_backward.default: rms_norm.backward,
    ops.rotary.default: rotary.forward,
    ops.rotary_backward.default: rotary.backward,
    ops.glu.default: glu.forward,
    ops.glu_backward.default: glu.backward,
    ops.round_stochastically.default: rounding.forward,
    ops.adam.default: adam.forward,
    ops.adam_amsgrad.default: adam.forward_amsgrad,
}
