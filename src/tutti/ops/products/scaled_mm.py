"""Matrix products in low precision, and roundings of their operands.

The contracted dim is split at blocks, each of which has scales of its own.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

import tutti.nn.linear.scaled_mm  # noqa: F401  (registers the operators)
from tutti.ir.op_info import FLOPS, SECONDS
from tutti.ir.step_graph import Call
from tutti.nn.linear.scaled_mm import block_of, format_of
from tutti.ops.registry import rules, shape_of

ROUND_OPERAND, ROUND_BOTH = torch.ops.tutti.round_operand.default, torch.ops.tutti.round_both.default
SCALED_MM = torch.ops.tutti.scaled_mm.default
DTYPES = {  # the peaks of devices with units for a format, by its name
    "float8": ("float8_e4m3fn", "float8_e4m3fnuz"),
    "mxfp8": ("mxfp8",),
    "nvfp4": ("nvfp4",),
}


def _round_operand(node: Call):
    x, dim, name = node.args
    block, form = block_of(shape_of(x)[dim], name), format_of(name)
    operand = "m (q i!)" if dim == 1 else "(q i!) m"
    return f"{operand} -> m (q p!), m (q s!)", {"i": block, "p": form.width(block), "s": form.blocks(block)}


def _scaled(node: Call):
    a, scales, *_, name, _ = node.args
    width, form = shape_of(a)[1], format_of(name)
    remainder = width * 8 // form.bits % form.block
    sizes = {"p": width, "s": shape_of(scales)[1]} if remainder or not width else {"p": form.width(form.block), "s": 1}
    return "m (q p!), m (q s!), n (q p!), n (q s!) -> m n", sizes


def _product(node: Call) -> tuple[int, int, int]:
    """(m, k, n) of a product."""
    (m, width), (n, _) = shape_of(node.args[0]), shape_of(node.args[2])
    return m, width * 8 // format_of(str(node.args[4])).bits, n


rules({ROUND_OPERAND: _round_operand, SCALED_MM: _scaled})
FLOPS[SCALED_MM] = lambda node: 2 * prod(_product(node))


def dtype_of(device: Any, name: str, other: Any) -> Any:
    """The dtype in which a device computes products of a format: its own, or that of the operands."""
    return next((dtype for dtype in DTYPES[name] if dtype in device.peak), device.dtype_with_peak(other))


def rounding_seconds(device: Any, name: str, read: int, rows: int, k: int, dtype: Any) -> float:
    """Seconds to round operands with so many rows in total: `read` bytes are read, and their rounded form written."""
    return device.stream_seconds(read + format_of(name).bytes_of(rows, k), "add", dtype)


def _rounding_seconds(device: Any, call: Any) -> float:
    """The operand is read once, and each of its rounded forms is written."""
    return device.stream_seconds(call.bytes, "add", call.read_dtype)


def _seconds(device: Any, call: Any) -> float:
    """The product at the device's rate for the format."""
    (m, width), _, (n, _), _ = call.shapes()
    name = str(call.node.args[4])
    k = width * 8 // format_of(name).bits
    return device.matmul_seconds(1, m, k, n, dtype_of(device, name, call.dtype))


SECONDS |= {ROUND_OPERAND: _rounding_seconds, ROUND_BOTH: _rounding_seconds, SCALED_MM: _seconds}
