"""Optimal assignment is never split: the column of each row depends on all entries."""

from __future__ import annotations

import torch

import tutti.nn.assignment  # noqa: F401  (registers the operator)
from tutti.ir.step_graph import Call
from tutti.ops.registry import operands, rules


def _assignment(node: Call):
    (cost,) = operands(node)
    return "n! m! -> k!, k!", {"k": min(cost.meta["val"].shape)}


rules({torch.ops.tutti.linear_sum_assignment.default: _assignment})
