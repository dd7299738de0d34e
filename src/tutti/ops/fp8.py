"""Matrix products in FP8. The contracted dim is split at blocks, each of which has scales of its own."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

import tutti.nn.fp8  # noqa: F401  (registers the operator)
from tutti.ir.op_info import FLOPS, SECONDS
from tutti.ir.step_graph import Call
from tutti.nn.fp8 import block_of
from tutti.ops.registry import rules, shape_of

FP8_MM = torch.ops.tutti.fp8_mm.default
NAMES = ("float8_e4m3fn", "float8_e4m3fnuz")  # as devices call it


def _fp8(node: Call):
    return "m (q i!), (q i!) n -> m n", {"i": block_of(shape_of(node.args[0])[1])}


rules({FP8_MM: _fp8})
FLOPS[FP8_MM] = lambda node: 2 * prod(shape_of(node.args[0])) * shape_of(node.args[1])[1]


def _seconds(device: Any, call: Any) -> float:
    """The product at the device's FP8 rate, after each operand was read and its rounded form written. A device without
    FP8 computes in the operands' dtype."""
    (m, k), (_, n) = call.shapes()
    dtype = next((name for name in NAMES if name in device.peak), device.known(call.dtype))
    rounding = sum(call.read) + (m * k + k * n)
    return device.matmul_seconds(1, m, k, n, dtype) + device.stream_seconds(rounding, "add", call.dtype)


SECONDS[FP8_MM] = _seconds
