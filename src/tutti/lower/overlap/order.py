"""Reorder the nodes of a graph."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush

import torch
from torch import fx

from tutti.ir.costs import FREE
from tutti.ir.step_graph import UPDATE
from tutti.lower.collectives import COLLECTIVES
from tutti.nn.adam import IN_PLACE

ARRANGING = {*FREE, torch.ops.aten.cat.default, torch.ops.aten.constant_pad_nd.default}


def arrange(nodes: Iterable[fx.Node]) -> None:
    """Put all nodes of a graph into this order."""
    first, *rest = nodes
    for node in rest:
        first.append(node)
        first = node


def sort(graph: fx.Graph) -> None:
    """Sort topologically. A node moves back only as far as its operands require."""
    placed: set[fx.Node] = set()
    waiting: dict[fx.Node, list[fx.Node]] = {}
    order: list[fx.Node] = []

    def place(node: fx.Node) -> None:
        todo = [node]
        while todo:
            n = todo.pop()
            missing = next((x for x in n.all_input_nodes if x not in placed), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(n)
                continue
            placed.add(n)
            order.append(n)
            todo += reversed(waiting.pop(n, []))

    for node in list(graph.nodes):
        place(node)
    arrange(order)


def contract(nodes: Sequence[fx.Node], groups: Sequence[Sequence[fx.Node]]) -> Iterator[fx.Node]:
    """An order of calls in which each group is consecutive; groups that are complete first come first.

    groups: a partition of the nodes without cyclic dependencies between groups.
    """
    at = {node: i for i, node in enumerate(nodes)}
    group_of = {node: i for i, group in enumerate(groups) for node in group}
    needs = [{group_of[x] for n in group for x in n.all_input_nodes if x in at} - {i} for i, group in enumerate(groups)]
    behind: list[list[int]] = [[] for _ in groups]
    for i, before in enumerate(needs):
        for j in before:
            behind[j].append(i)
    ready = [(max(map(at.__getitem__, groups[i])), i) for i, before in enumerate(needs) if not before]
    heapify(ready)
    while ready:
        _, i = heappop(ready)
        yield from sorted(groups[i], key=at.__getitem__)
        for j in behind[i]:
            needs[j].discard(i)
            if not needs[j]:
                heappush(ready, (max(map(at.__getitem__, groups[j])), j))


def collectives_together(graph: fx.Graph) -> dict[fx.Node, tuple[bool, int]]:
    """Make collectives of the update that can start together consecutive. Returns the dependencies of each: whether it
    depends on updated parameters, and on how many other collectives.

    Nodes from the first of the update on are sorted by these: gradients are reduced after the backward pass (or earlier
    if that saves memory, `lower.overlap.bucket`), new parameters gathered when all are computed. As one call updates
    many parameters (`lower.memory.inplace`), nothing that an update reads may depend on another update.
    """
    nodes = list(graph.nodes)
    first = next((i for i, n in enumerate(nodes) if n.meta.get("phase") == UPDATE and n.op == "call_function"), None)
    if first is None:
        return {}
    tail = [n for n in nodes[first:] if n.op == "call_function"]
    waits: dict[fx.Node, tuple[bool, int]] = {}
    for node in tail:
        reads = [x for x in node.all_input_nodes if x in waits]
        if node.target is operator.getitem and reads:  # stays with its maker
            waits[node] = waits[reads[0]]
            continue
        updated = any(waits[x][0] or _maker(x).target in IN_PLACE for x in reads)
        waits[node] = updated, max((waits[x][1] + (x.target in COLLECTIVES) for x in reads), default=0)
    tail.sort(key=lambda n: (waits[n], n.target in COLLECTIVES))
    arrange([*nodes[:first], *tail, nodes[-1]])
    return {n: w for n, w in waits.items() if n.target in COLLECTIVES}


def chain(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The calls that compute a call's operands, and the calls that only rearrange these."""
    roots, arranging, todo = [], [], list(node.all_input_nodes)
    while todo:
        x = todo.pop()
        if x.op == "call_function" and x.target in ARRANGING:
            arranging.append(x)
            todo += x.all_input_nodes
        else:
            roots.append(x)
    return roots, arranging


def advance(graph: fx.Graph, nodes: Sequence[fx.Node]) -> list[tuple[fx.Node, fx.Node]]:
    """Move each node, with the calls that rearrange its operands, right behind the calls that compute the operands.

    Returns each node with the last of these calls, in order.
    """
    at = {x: i for i, x in enumerate(graph.nodes)}
    chains = {node: chain(node) for node in nodes}
    maker = {node: max(roots, key=at.__getitem__) for node, (roots, _) in chains.items()}
    ordered = sorted(nodes, key=lambda node: at[maker[node]])
    behind: dict[fx.Node, fx.Node] = {}
    moved: set[fx.Node] = set()
    for node in ordered:
        last = behind.get(maker[node], maker[node])
        while last.next.target in FREE and last.next.args[0] is maker[node]:  # its results
            last = last.next
        while last.next.op == "placeholder":
            last = last.next
        for x in [*sorted(set(chains[node][1]), key=at.__getitem__), node]:
            if at[x] > at[maker[node]] and x not in moved:
                last.append(x)
                last = x
                moved.add(x)
        behind[maker[node]] = last
    return [(node, maker[node]) for node in ordered]


def _maker(node: fx.Node) -> fx.Node:
    return node.args[0] if node.target is operator.getitem else node  # pyright: ignore[reportReturnType]
