"""Linear layers for few rows, with weights of floats, int8, int4, other bits and float8.

Rows, outputs and the contracted dim can be split. Where rows are rounded to int8, the contracted dim cannot: a scale
is that of a whole row.
"""

from __future__ import annotations

from math import gcd, lcm, prod
from typing import Any

import torch

import tutti.nn.experts.linear_experts
import tutti.nn.linear.linear_bits
import tutti.nn.linear.linear_codes
import tutti.nn.linear.linear_int4
import tutti.nn.linear.linear_int8
import tutti.nn.linear.linear_rows  # noqa: F401  (registers the operators)
from tutti.ir.op_info import FLOPS, SECONDS
from tutti.ir.step_graph import Call
from tutti.nn.linear.linear_int4 import BLOCK
from tutti.ops.registry import named, operands, rules, shape_of

ops = torch.ops.tutti
ROWS, INT8, INT4 = ops.linear_rows.default, ops.linear_int8.default, ops.linear_int4.default
BITS, CODES = ops.linear_bits.default, ops.linear_codes.default
EXPERTS = ops.linear_experts.default


def _rows(node: Call) -> str:
    bias, marks = (", +n", "~02 ~12") if len(operands(node)) > 2 else ("", "~0 ~1")
    return f"m k, n k{bias} -> m n | {marks}"


def _int8(node: Call) -> str:
    arguments = named(node.target, node.args, node.kwargs)
    bias, k = ", +n" if arguments["bias"] is not None else "", "k!" if arguments["rounded"] else "k"
    return f"m {k}, n {k}, n{bias} -> m n | {_linear(arguments, '3' if bias else '')}"


def _packed(node: Call):
    """The rule for weights of int4, or of 2 or 3 bits. k is split in units of whole blocks and groups."""
    arguments = named(node.target, node.args, node.kwargs)
    k, groups = shape_of(arguments["x"])[1], shape_of(arguments["scales"])[1]
    units = k // max(BLOCK, k // groups)
    u = "u!" if arguments["rounded"] else "u"
    zeros = ", n (u g!)" if arguments["zeros"] is not None else ""
    bias = ", +n" if arguments["bias"] is not None else ""
    linear = _linear(arguments, str(3 + bool(zeros)) if bias else "")
    return f"m ({u} s!), n (u b!), n (u g!){zeros}{bias} -> m n | {linear}", {"u": units}


def _codes(node: Call):
    """Streams of bits, of which k is split in units of whole words and groups, or float8."""
    arguments = named(node.target, node.args, node.kwargs)
    k, groups = shape_of(arguments["x"])[1], shape_of(arguments["scales"])[1]
    words = 32 // gcd(32, arguments["bits"]) if arguments["weight"].meta["val"].dtype == torch.uint8 else 1
    unit = lcm(words, k // groups if groups > 1 else 1)
    g = "(u g!)" if groups > 1 else "1"
    zeros = f", n {g}" if arguments["zeros"] is not None else ""
    bias = ", +n" if arguments["bias"] is not None else ""
    linear = _linear({"rounded": False}, str(3 + bool(zeros)) if bias else "")
    return f"m (u s!), n (u b!), n {g}{zeros}{bias} -> m n | {linear}", {"u": 1 if k % unit else k // unit}


def _experts(node: Call):
    """As the operators of one expert. Experts are not split."""
    arguments = named(node.target, node.args, node.kwargs)
    k, of_scales, float8 = shape_of(arguments["x"])[1], shape_of(arguments["scales"]), arguments["layout"] == "float8"
    groups = of_scales[2] if len(of_scales) > 2 else 1
    words = 1 if float8 or arguments["layout"] == "int8" else 32 // gcd(32, arguments["bits"])
    unit = lcm(BLOCK if arguments["layout"] in ("int4", "low") else words, k // groups if groups > 1 else 1)
    u, g = "u!" if arguments["rounded"] else "u", "" if len(of_scales) == 2 else " (u g!)" if groups > 1 else " 1"
    zeros = f", e! n{g}" if arguments["zeros"] is not None else ""
    line = f"m ({u} s!), m, e! n (u b!), e! n{g}{zeros} -> m n | "
    return line + ("~3" if arguments["rounded"] else "~0 ~3"), {"u": 1 if k % unit else k // unit}


def _linear(arguments: dict[str, Any], bias: str) -> str:
    """Linear in the scales, and in x unless it is rounded, with the bias."""
    return f"~2{bias}" if arguments["rounded"] else f"~0{bias} ~2{bias}"


rules({ROWS: _rows, INT8: _int8, INT4: _packed, BITS: _packed, CODES: _codes, EXPERTS: _experts})


def _flops(node: Call) -> int:
    return 2 * prod(shape_of(node.args[0])) * shape_of(node.args[1])[0]


def _flops_of_experts(node: Call) -> int:
    return 2 * prod(shape_of(node.args[0])) * shape_of(node.args[2])[1]


def _seconds(device: Any, call: Any) -> float:
    """The product, or reading the weight."""
    products = call.flops / device.rate(device.dtype_with_peak(call.dtype))
    return max(products, device.stream_seconds(call.bytes, "add", call.dtype))


def _seconds_of_experts(device: Any, call: Any) -> float:
    """The products, or reading the weights of the chosen experts."""
    rows, _, weight, *_ = call.shapes()
    products = call.flops / device.rate(device.dtype_with_peak(call.dtype))
    share = min(1.0, rows[0] / weight[0])
    return max(products, device.stream_seconds(share * call.bytes, "add", call.dtype))


ALL = ROWS, INT8, INT4, BITS, CODES
FLOPS |= {**dict.fromkeys(ALL, _flops), EXPERTS: _flops_of_experts}
SECONDS |= {**dict.fromkeys(ALL, _seconds), EXPERTS: _seconds_of_experts}
