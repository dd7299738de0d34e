"""Liveness: the last use of each value."""

from __future__ import annotations

from torch import fx


def last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return for each call the values whose last use it is."""
    seen: set[fx.Node] = set()
    dies: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        last = [n for n in node.all_input_nodes if n not in seen]
        seen.update(last)
        if node.op == "call_function":
            dies[node] = last + ([] if node in seen else [node])
    return dies
