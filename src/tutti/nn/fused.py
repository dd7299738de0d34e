"""Fused operators and their formulas in plain ATen: what a compiler is given, to fuse it with what stands around."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tutti.nn import rms_norm

ops = torch.ops.tutti

FUSED: dict[torch._ops.OpOverload, Callable] = {
    ops.rms_norm.default: rms_norm.forward,
    ops.rms_norm_backward.default: rms_norm.backward,
}
