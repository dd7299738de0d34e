"""Matrix products in low precision. The contracted dim is split at blocks, each of which has scales of its own."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

import tutti.nn.scaled_mm  # noqa: F401  (registers the operator)
from tutti.ir.op_info import FLOPS, SECONDS
from tutti.ir.step_graph import Call
from tutti.nn.scaled_mm import block_of, format_of
from tutti.ops.registry import rules, shape_of

SCALED_MM = torch.ops.tutti.scaled_mm.default
DTYPES = {  # the peaks of devices with units for a format, by its name
    "float8": ("float8_e4m3fn", "float8_e4m3fnuz"),
    "mxfp8": ("mxfp8",),
    "nvfp4": ("nvfp4",),
}


def _scaled(node: Call):
    return "m (q i!), (q i!) n -> m n", {"i": block_of(shape_of(node.args[0])[1], str(node.args[2]))}


rules({SCALED_MM: _scaled})
FLOPS[SCALED_MM] = lambda node: 2 * prod(shape_of(node.args[0])) * shape_of(node.args[1])[1]


def dtype_of(device: Any, name: str, other: Any) -> Any:
    """The dtype in which a device computes products of a format: its own, or that of the operands."""
    return next((dtype for dtype in DTYPES[name] if dtype in device.peak), device.known(other))


def rounding_seconds(device: Any, name: str, read: int, rows: int, k: int, dtype: Any) -> float:
    """Seconds to round operands with so many rows in total: `read` bytes are read, and their rounded form written."""
    return device.stream_seconds(read + format_of(name).bytes_of(rows, k), "add", dtype)


def _seconds(device: Any, call: Any) -> float:
    """The product at the device's rate for the format, after both operands were rounded."""
    (m, k), (_, n) = call.shapes()
    name = str(call.node.args[2])
    rounding = rounding_seconds(device, name, sum(call.read), m + n, k, call.dtype)
    return device.matmul_seconds(1, m, k, n, dtype_of(device, name, call.dtype)) + rounding


SECONDS[SCALED_MM] = _seconds
