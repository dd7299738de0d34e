"""Dropless experts: tokens, choices, the experts' inner width (tensor parallelism) and the experts can be split.

A rank with some of the experts computes their rows and leaves out the others, so the results of all ranks sum to the
total: expert parallelism that gathers tokens and scatters partial sums. In the fused gate and up projection, the width
is split inside both halves.
"""

from __future__ import annotations

from math import log, prod

import torch

import tutti.nn.experts  # noqa: F401  (registers the operators)
from tutti.ir.step_graph import Call
from tutti.ops.registry import LOCAL, WORK, operands, rules

ops = torch.ops.tutti
FORWARD, BACKWARD = ops.experts.default, ops.experts_backward.default


def _lines(up: Call, down: Call) -> tuple[str, str, dict[str, int]]:
    """Dims of the experts' two tensors, and the number of halves."""
    halves = up.meta["val"].shape[1] // down.meta["val"].shape[2]
    return f"e* {'(c! f)' if halves == 2 else 'f'} h!", "e* h! f", {"c": halves} if halves == 2 else {}


def _experts(node: Call):
    up, down, sizes = _lines(*operands(node)[3:])
    return f"t h!, t k, t k, {up}, {down} -> t h! | ~2 ~4", sizes


def _experts_backward(node: Call):
    up, down, sizes = _lines(*operands(node)[4:])
    return f"t h!, t h!, t k, t k, {up}, {down} -> t h!, t k, {up}, {down} | ~0", sizes


rules({FORWARD: _experts, BACKWARD: _experts_backward})


def _own(target):
    """The same operator for the local experts."""

    def local(here, *args):
        *tensors, activation, first, total = args
        return target(*tensors, activation, first + here.offset("e"), total)

    return local


LOCAL |= {FORWARD: _own(FORWARD), BACKWARD: _own(BACKWARD)}


def _busiest(node: Call, factor: str, outer: int, k: int) -> float:
    """The largest of k loads, as a multiple of their mean, if N choices are distributed over k ranks independently and
    uniformly.

    A load has mean N/k and variance N/k (1 - 1/k), and is about normal; the largest of k standard normal numbers is
    about sqrt(2 ln k). At most, all N choices are on one rank.
    """
    if factor != "e":
        return 1.0
    choices = prod(operands(node)[-3].meta["val"].shape)
    return min(k, 1 + (2 * log(k) * (k - 1) / max(1, choices)) ** 0.5)


WORK |= {FORWARD: _busiest, BACKWARD: _busiest}
