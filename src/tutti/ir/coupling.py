"""Coupling: updates that depend on gradients of other parameters, for instance through the global gradient norm."""

from __future__ import annotations

from typing import Any

from torch import fx

from tutti.ir.step_graph import BACKWARD, UPDATE


def coupled(graph: fx.Graph) -> bool:
    """Return whether any value of the update depends on several results of the backward pass."""
    of: dict[fx.Node, fx.Node] = {}  # a value of the update -> the result it depends on
    for node in graph.nodes:
        if node.op != "call_function" or node.meta.get("phase") != UPDATE:
            continue
        results: set[Any] = {of.get(x, x) for x in node.all_input_nodes if x in of or _is_result(x)}
        if len(results) > 1:
            return True
        for x in results:
            of[node] = x
    return False


def _is_result(x: fx.Node) -> bool:
    return x.op == "call_function" and x.meta.get("phase") == BACKWARD
