"""Dropless experts: tokens, choices, the experts' inner width (tensor parallelism) and the experts can be split.

If an axis splits tokens and experts at once, tokens travel to their experts and the results back
(`ops.experts.experts_exchange`). If it splits experts alone, each rank has all tokens, computes the rows of its own
experts and leaves out the others, so the results of all ranks sum to the total. In the fused gate and up projection,
the width is split inside both halves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil, log, prod
from typing import Any

import torch

import tutti.nn.experts.experts  # noqa: F401  (registers the operators)
from tutti.ir.op_info import FLOPS, LOCAL, SECONDS, SENDS, WORK
from tutti.ir.step_graph import Call
from tutti.nn.experts.gate import gate_of
from tutti.nn.linear.scaled_mm import block_of
from tutti.ops.experts import experts_exchange
from tutti.ops.products.scaled_mm import dtype_of, rounding_seconds
from tutti.ops.registry import operands, rules, shape_of

ops = torch.ops.tutti
FORWARD, BACKWARD = ops.experts.default, ops.experts_backward.default


def _rule(node: Call, backward: bool) -> tuple[str, dict[str, int]]:
    up, down, *biases = operands(node)[3 + backward :]
    halves = up.meta["val"].shape[1] // down.meta["val"].shape[2]
    width, matmul = "f@" if biases else "f", node.args[10 + backward]
    inner = f"{width} i!" if matmul else width  # in low precision, whole blocks of the second product's contracted dim
    width = f"({inner})" if matmul else width
    both = f"({inner} c!)" if gate_of(node.args[7 + backward]).interleaved else f"(c! {inner})"
    up_rows = {1: width, 2: both}[halves]
    experts = ", ".join([f"e* {up_rows} h!", f"e* h! {width}", f"e* {up_rows}", "e* h!"][: 2 + len(biases)])
    sizes = {} if halves == 1 else {"c": halves}
    sizes |= {"i": block_of(down.meta["val"].shape[2], matmul)} if matmul else {}
    if backward:
        return f"t h!, t h!, t k, t k, {experts} -> t h!, t k, {experts} | ~0 t&e", sizes
    return f"t h!, t k, t k, {experts} -> t h! | ~2 {'~46' if biases else '~4'} t&e", sizes


rules({FORWARD: partial(_rule, backward=False), BACKWARD: partial(_rule, backward=True)})


def _own(target, traveling):
    """The same operator for the local experts, on tokens that are here already or travel here. If ranks split the inner
    width, one of them adds the bias of the second product."""

    def local(here, *args):
        *tensors, down_bias, activation, first, total, matmul, filled = args
        share = None
        if down_bias is not None and here.parts("f") > 1:
            share = 1.0 if here.part("f") == 0 else 0.0
            down_bias = down_bias * share
        args = (*tensors, down_bias, activation)
        if here.joint("e"):
            results = traveling(target, here, *args, first, total, matmul)
        else:
            results = target(*args, first + here.offset("e"), total, matmul, filled)
        return [*results[:-1], results[-1] * share] if share is not None and target is BACKWARD else results

    return local


LOCAL |= {FORWARD: _own(FORWARD, experts_exchange.forward), BACKWARD: _own(BACKWARD, experts_exchange.backward)}
SENDS |= {FORWARD: experts_exchange.sends(1), BACKWARD: experts_exchange.sends(2)}


def _busiest(node: Call, factor: str, outer: int, k: int) -> float:
    """The largest of k loads, as a multiple of their mean, if N choices are distributed over k ranks independently and
    uniformly.

    A load has mean N/k and variance N/k (1 - 1/k), and is about normal; the largest of k standard normal numbers is
    about sqrt(2 ln k). At most, all N choices are on one rank.
    """
    if factor != "e":
        return 1.0
    choices = prod(shape_of(node.args[1 + (node.target is BACKWARD)]))
    return min(k, 1 + (2 * log(k) * (k - 1) / max(1, choices)) ** 0.5)


WORK |= {FORWARD: _busiest, BACKWARD: _busiest}


def _flops(products: int, backward: bool = False) -> Callable[[Call], int]:
    """`products` times those of the forward pass: both matrices of an expert, for the average number of tokens routed
    to the local experts. The product that a backward pass recomputes is not counted."""

    def flops(node: Call) -> int:
        _, index, _, up, down, _, _, _, _, total = node.args[backward : 10 + backward]
        return products * 2 * prod(shape_of(index)) * (prod(shape_of(up)) + prod(shape_of(down))) // total

    return flops


def _seconds(device: Any, call: Any, backward: bool, repeats: bool = False) -> float:
    """A product for each expert, of its share of the choices; of more where `flops` says that this rank is busier.
    Between them the choices' rows are gathered, activated and added. repeats: whether the first product of the forward
    pass is computed again. In low precision, both operands of each product are rounded first."""
    _, (tokens, k), _, (experts, up_width, hidden), (_, _, width) = call.shapes()[backward : 5 + backward]
    total, matmul, filled = call.node.args[9 + backward : 12 + backward]
    rows = ceil(tokens * k / total)
    first = (rows, hidden, up_width)
    products = [first, (rows, width, hidden)]
    if backward:
        products = [(rows, hidden, width), (hidden, rows, width), (up_width, rows, hidden), (rows, up_width, hidden)]
    busier = call.flops / max(1, sum(2 * experts * prod(sizes) for sizes in products))
    products += [first] if repeats else []
    item = call.dtype.itemsize
    unused = 0 if filled < 0 else (2 + backward) * (tokens - filled) * hidden * item  # of x and results, or gradients
    bytes_ = call.bytes - unused + (1 + backward) * 2 * rows * experts * (hidden + up_width) * item
    dtype = dtype_of(device, matmul, call.dtype) if matmul else device.dtype_with_peak(call.dtype)
    taken = sum(device.matmul_seconds(experts, *sizes, dtype, kind="grouped") for sizes in products)
    if matmul:
        for m, inner, n in products:
            numbers = experts * (m + n) * inner
            taken += rounding_seconds(device, matmul, numbers * item, experts * (m + n), inner, call.dtype)
    return max(1.0, busier) * taken + device.stream_seconds(bytes_, "add", call.dtype)


FLOPS |= dict.fromkeys((FORWARD, ops.experts_training.default), _flops(1))
FLOPS |= dict.fromkeys((BACKWARD, ops.experts_backward_kept.default), _flops(2, backward=True))
SECONDS |= dict.fromkeys((FORWARD, ops.experts_training.default), partial(_seconds, backward=False))
SECONDS |= {
    BACKWARD: partial(_seconds, backward=True, repeats=True),
    ops.experts_backward_kept.default: partial(_seconds, backward=True),
}
