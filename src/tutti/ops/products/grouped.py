"""Grouped matrix products. Rows, columns, the contracted dim and the groups can be split. A rank with some groups
leaves out the rows of the others, and the results add up."""

from __future__ import annotations

from math import prod

import torch

import tutti.nn.experts.grouped  # noqa: F401  (registers the operator)
from tutti.ir.op_info import FLOPS, LOCAL, UNEVEN
from tutti.ir.step_graph import Call
from tutti.ops.registry import operands, rules, shape_of

GROUPED = torch.ops.tutti.grouped_mm.default
LINES = {
    (2, 3): "s* k, g* k n, e! -> s n | ~0 ~1",
    (2, 2): "m s*, s* n, e! -> g* m n | ~0 ~1",
    (3, 2): "g* m k, k s*, e! -> m s | ~0 ~1",
}


def _grouped(node: Call):
    a, b, _ = (len(x.meta["val"].shape) for x in operands(node))
    return LINES[a, b], {"g": node.args[4]} if (a, b) == (2, 2) else {}


rules({GROUPED: _grouped})


def _own(here, a, b, ends, first, count):
    """The ends counted from this rank's first row, and the local groups."""
    ends = (ends - here.offset("s")).clamp(0, here.size("s"))
    return GROUPED(a, b, ends, first + here.offset("g"), here.size("g"))


LOCAL[GROUPED] = _own


def _flops(node: Call) -> int:
    """Rows outside all groups are counted. If the product contracts over the groups, each row is in one."""
    a, b = (shape_of(x) for x in node.args[:2])
    return 2 * prod(a) * b[-1] if len(a) == 2 else 2 * prod(a[1:]) * b[-1]


FLOPS[GROUPED] = _flops

UNEVEN |= dict.fromkeys((GROUPED,), True)
