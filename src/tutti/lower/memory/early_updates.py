"""Move updates forward: after all that they read is made, and what they overwrite is no longer read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from torch import fx

from tutti.lower.memory.aliasing import behind_views, overwritten
from tutti.lower.memory.transfers import fetch
from tutti.lower.overlap.order import arrange


def early(graph: fx.Graph, moved: Collection[fx.Node]) -> None:
    """Move these nodes of a graph forward, in place. The order of the others is kept.

    A node that depends only on inputs goes right before its first reader.
    """
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    needs = {node: _needs(node, position) for node in nodes if node in moved}
    lazy: set[fx.Node] = set()
    for node, before in needs.items():
        if before <= lazy:
            lazy.add(node)
    waits = {node: len(before - lazy) for node, before in needs.items() if node not in lazy}
    followers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in waits:
        for x in needs[node] - lazy:
            followers[x].append(node)
    order: list[fx.Node] = []
    placed: set[fx.Node] = set()

    def place(node: fx.Node) -> None:
        todo = [node]
        while todo:
            n = todo.pop()
            for x in _late(n, needs, lazy, placed):
                order.append(x)
                placed.add(x)
            order.append(n)
            placed.add(n)
            for follower in sorted(followers[n], key=position.__getitem__, reverse=True):
                waits[follower] -= 1
                if not waits[follower]:
                    todo.append(follower)

    for node in nodes:
        if node not in needs:
            place(node)
    arrange(order)


def _needs(node: fx.Node, position: dict[fx.Node, int]) -> set[fx.Node]:
    """Calls that must precede a node: its operands, and readers of the old values that it overwrites."""
    before = set(node.all_input_nodes)
    for home in overwritten(node):
        readers = behind_views(home)
        readers |= {user for reader in readers if reader.target is fetch for user in reader.users}  # until copied
        before |= {user for user in readers if position[user] < position[node]}
    return {x for x in before if x.op == "call_function"}


def _late(
    node: fx.Node, needs: Mapping[fx.Node, Iterable[fx.Node]], lazy: set[fx.Node], placed: set[fx.Node]
) -> list[fx.Node]:
    """Return the lazy nodes that a node needs, in order."""
    ordered: list[fx.Node] = []

    def visit(n: fx.Node) -> None:
        for x in needs.get(n, n.all_input_nodes):
            if x in lazy and x not in placed and x not in ordered:
                visit(x)
                ordered.append(x)

    visit(node)
    return ordered
