"""Dropless experts: tokens, choices, the width inside of an expert (tensor parallelism) and the experts may be split.

A rank that has some of the experts computes the rows that they are given and leaves out the others, so that the results
of all ranks sum up to the whole: expert parallelism in which tokens are gathered and partial sums scattered. In the
fused gate and up, the width is split inside both halves.
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
    """Of the experts' two tensors, and the number of halves."""
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
    """The same operator for the experts that are here."""

    def local(here, *args):
        *tensors, activation, first, total = args
        return target(*tensors, activation, first + here.offset("e"), total)

    return local


LOCAL |= {FORWARD: _own(FORWARD), BACKWARD: _own(BACKWARD)}


def _busiest(node: Call, factor: str, outer: int, k: int) -> float:
    """The largest of k loads, as a multiple of their mean, where N choices fall on k ranks evenly and independently.

    A load has mean N/k and variance N/k (1 - 1/k), and is about normal; the largest of k standard normal numbers is
    about sqrt(2 ln k). All N choices on one rank are the most that can be.
    """
    if factor != "e":
        return 1.0
    choices = prod(operands(node)[-3].meta["val"].shape)
    return min(k, 1 + (2 * log(k) * (k - 1) / max(1, choices)) ** 0.5)


WORK |= {FORWARD: _busiest, BACKWARD: _busiest}
