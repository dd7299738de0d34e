"""Grouped matrix products. Rows, columns, the contracted dim and the groups can be split. A rank with some groups
leaves out the rows of the others, and the results add up."""

from __future__ import annotations

import torch

import tutti.nn.grouped  # noqa: F401  (registers the operator)
from tutti.ir.step_graph import Call
from tutti.ops.registry import LOCAL, operands, rules

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
