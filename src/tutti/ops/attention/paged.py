"""A paged cache: heads can be split, of queries and keys together, and the width of what is written. Attention of whole
sequences can be split over these, too.

With grouped queries, a split is over key heads, or within each group, whose key head is then on all ranks.
"""

from __future__ import annotations

from typing import Any

import torch

import tutti.nn.attention.paged_attention
import tutti.nn.attention.paged_write
import tutti.nn.attention.sequence_attention  # noqa: F401  (registers the operators)
from tutti.ir.op_info import FLOPS, SECONDS
from tutti.ir.step_graph import Call
from tutti.nn.attention.paged_attention import ROUNDED
from tutti.ops.registry import named, rules, shape_of

ops = torch.ops.tutti
ATTENTION, WRITE, WRITE_IN_PLACE = ops.paged_attention.default, ops.paged_write.default, ops.paged_write_.default
SEQUENCES = ops.sequence_attention.default


def _added(node: Call) -> str:
    """Operands by head, where there are some."""
    optional = (("sinks", "(g r)"), ("bias", "(g r) k!"))
    return "".join(f", {x}" for name, x in optional if node.kwargs.get(name) is not None)


def _attention(node: Call):
    heads, groups, added = shape_of(node.args[0])[1], shape_of(node.args[1])[1], _added(node)
    if node.args[1].meta["val"].dtype in ROUNDED:  # a row has its scale in it
        line = f"t! (g r) d!, n! g c!, n! g f!, s! b!, u!, s!{added} -> t! (g r) e!"
    else:
        line = f"t! (g r) d!, n! g d!, n! g e, s! b!, u!, s!{added} -> t! (g r) e | ~2"
    return line, {"g": groups, "r": heads // groups}


def _sequences(node: Call):
    heads, groups = shape_of(node.args[0])[2], shape_of(node.args[1])[2]
    line = f"b t! (g r) d!, b t! g d!, b t! g e{_added(node)} -> b t! (g r) e | ~2"
    return line, {"g": groups, "r": heads // groups}


def _write(node: Call) -> str:
    cache, values = (x.meta["val"].dtype for x in node.args[:2])
    if cache != values:  # rows of int8 or int4, with their scales
        return "n! h c!, t! h d!, t! -> n! h c!"
    return "n! h d, t! h d, t! -> n! h d | ~01"


rules({ATTENTION: _attention, SEQUENCES: _sequences, WRITE: _write})


def _seen(node: Call) -> int:
    """The keys that a token sees at most: the capacity of a sequence's cache blocks, or the window."""
    keys = shape_of(node.args[3])[1] * node.kwargs["block"]
    return min(keys, named(node.target, node.args, node.kwargs)["window"] or keys)


def _flops(node: Call) -> int:
    tokens, heads, width = shape_of(node.args[0])
    return 2 * tokens * heads * _seen(node) * (width + shape_of(node.args[2])[2])


def _flops_of_sequences(node: Call) -> int:
    """Each token sees half of the tokens, or the window."""
    (rows, t, heads, width), value = shape_of(node.args[0]), shape_of(node.args[2])
    seen = min(t / 2, named(node.target, node.args, node.kwargs)["window"] or t)
    return int(2 * rows * t * heads * seen * (width + value[3]))


def _seconds(device: Any, call: Any) -> float:
    """The products, or reading the cached keys and values of each sequence once, not the whole cache."""
    query, keys, values, tables, *_ = call.shapes()
    cached = min(keys[0], tables[0] * _seen(call.node))
    moved = cached * keys[1] * (keys[2] + values[2]) + query[0] * query[1] * (query[2] + values[2])
    products = call.flops / device.rate(device.dtype_with_peak(call.dtype))
    return max(products, device.stream_seconds(moved * call.dtype.itemsize, "add", call.dtype))


def _write_seconds(device: Any, call: Any) -> float:
    """Only the new rows are moved, if the cache is written in place."""
    tokens, heads, width = call.shapes()[1]
    return device.stream_seconds(2 * tokens * heads * width * call.dtype.itemsize, "scatter", call.dtype)


FLOPS |= {ATTENTION: _flops, SEQUENCES: _flops_of_sequences}
SECONDS |= {ATTENTION: _seconds, WRITE: _write_seconds, WRITE_IN_PLACE: _write_seconds}
