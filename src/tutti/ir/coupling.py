"""Coupling: updates that wait for gradients of other parameters, as those do that are clipped by their global norm."""

from __future__ import annotations

from typing import Any

from torch import fx

from tutti.ir.step_graph import BACKWARD, UPDATE


def coupled(graph: fx.Graph) -> bool:
    """Whether anything in the update is made of several results of the backward pass."""
    of: dict[fx.Node, fx.Node] = {}  # what the update makes -> the result that it is made of
    for node in graph.nodes:
        if node.op != "call_function" or node.meta.get("phase") != UPDATE:
            continue
        found: set[Any] = {of.get(x, x) for x in node.all_input_nodes if x in of or _is_result(x)}
        if len(found) > 1:
            return True
        for x in found:
            of[node] = x
    return False


def _is_result(x: fx.Node) -> bool:
    return x.op == "call_function" and x.meta.get("phase") == BACKWARD
