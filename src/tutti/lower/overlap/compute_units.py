"""Units: maximal computations without a break, so that schedules order few and similar things.

A collective is a unit, and so is a matrix product or any other call that is to stand alone. Other calls form a unit if
they have equal depth (number of such calls on the longest path to them, within one copy of the batch), are needed for
the same collective first, belong to the same phase, and are connected or share an operand. Recomputed calls are not
grouped with those that they repeat. Depth never decreases along a path, and what a collective needs never follows it,
so units have no cyclic dependencies. Equal layers have equal units.

A view of an input or of a received value belongs to its reader, so that it does not wait for a collective early. A view
of a computed value belongs to its maker.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import inf

import torch
from torch import fx

from tutti.ir.costs import FREE
from tutti.ir.step_graph import BACKWARD, FORWARD, UPDATE
from tutti.lower.collectives import COLLECTIVES
from tutti.lower.memory.aliasing import TURNING, WRITES, looks, overwritten
from tutti.lower.memory.inplace import written

PHASES = ("", FORWARD, "recompute", BACKWARD, UPDATE)
COPIED = "copied view"  # key in the meta of a view's copy for one reader: the view
Unit = list[fx.Node]
aten = torch.ops.aten


def units(graph: fx.Graph, alone: Callable[[fx.Node], bool]) -> list[Unit]:
    """Divide a graph into units, in an executable order close to that of its nodes.

    Views of inputs and received values are copied in front of each reader, in place. The last unit holds those that
    only the output reads.
    """
    _give_views_to_readers(graph)
    return _Units(graph, alone).build()


def needs(units: list[Unit]) -> list[set[int]]:
    """Return the indices of the units that must precede each: its operands, and the readers of what it overwrites."""
    of = {node: i for i, unit in enumerate(units) for node in unit}
    predecessors: list[set[int]] = [set() for _ in units]
    for node, i in of.items():
        predecessors[i].update(of[x] for x in node.all_input_nodes if x in of)
    for node, i in of.items():
        for place in overwritten(node):
            predecessors[i].update(of[reader] for reader in readers_before(place, node) if reader in of)
    return [read - {i} for i, read in enumerate(predecessors)]


def readers_before(place: fx.Node, write: fx.Node) -> list[fx.Node]:
    """Return the readers of an input, directly or through views, before calls write into it.

    If several calls write into it, they are in order.
    """
    readers, todo = [], [place]
    while todo:
        for user in todo.pop().users:
            if user is write or user.op == "output" or user.target is written or user.target in WRITES:
                continue
            if looks(user) and user.target is not operator.getitem:
                todo.append(user)
            else:
                readers.append(user)
    return readers


def is_view(node: fx.Node) -> bool:
    """Return whether a call is a view. A reshape of a tensor whose dims are permuted in memory is not."""
    if node.op != "call_function" or node.target not in FREE or node.target is operator.getitem:
        return False
    if node.target is not aten.reshape.default:
        return True
    x = node.all_input_nodes[0]
    while x.target in FREE and x.target not in TURNING and x.target is not operator.getitem:
        x = x.all_input_nodes[0]
    return x.target not in TURNING


def _is_free(node: fx.Node) -> bool:
    """Return whether a call takes no time: a view, or a getitem. Readers in all layers may view one unit's result."""
    return is_view(node) or node.target is operator.getitem


def take_back_views(graph: fx.Graph) -> None:
    """Undo the copies of views that `units` made, in place."""
    for node in list(graph.nodes):
        if (view := node.meta.get(COPIED)) is not None:
            node.replace_all_uses_with(view)
            graph.erase_node(node)


def _give_views_to_readers(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if is_view(node) and node.users and _is_input_view(node):
            first, *others = node.users
            for reader in others:
                with graph.inserting_before(reader):
                    copy = graph.node_copy(node)
                copy.meta[COPIED] = node
                reader.replace_input_with(node, copy)
            first.prepend(node)


def _is_input_view(view: fx.Node) -> bool:
    """Return whether a view is one of an input or of a received value."""
    root = view
    while is_view(root):
        root = root.all_input_nodes[0]
    return root.op == "placeholder" or root.target in COLLECTIVES


class _Units:
    def __init__(self, graph: fx.Graph, alone: Callable[[fx.Node], bool]):
        self.graph = graph
        self.calls = [n for n in graph.nodes if n.op == "call_function"]
        self.reads = {n: [x for x in n.all_input_nodes if x.op == "call_function"] for n in self.calls}
        self.alone = {n for n in self.calls if n.target in COLLECTIVES or n.target in WRITES or alone(n)}
        self.input_views = {n for n in self.calls if is_view(n) and _is_input_view(n)}
        self.root = {n: n for n in self.calls}  # union-find

    def build(self) -> list[Unit]:
        depth, first, phase = self.depths(), self.firsts(), self.phases()
        key = {n: (n.meta.get("copy", 0), depth[n], first[n], phase[n]) for n in self.calls}
        beside: dict[tuple, fx.Node] = {}
        for n in self.calls:
            if n in self.input_views:
                continue
            free = _is_free(n)
            for x in self.reads[n]:
                if x in self.input_views:
                    continue
                maker = self.find(x)
                if free:
                    self.root[n] = maker
                elif n not in self.alone:
                    joined = maker not in self.alone and key[maker] == key[n]
                    self.root[self.find(n)] = maker if joined else self.find(beside.setdefault((x, key[n]), n))
        last: dict[fx.Node, None] = {}
        for n in reversed(self.calls):
            if n in self.input_views:
                (reader,) = n.users or (None,)
                if reader is None or reader.op == "output" or reader in last:
                    last[n] = None
                else:
                    self.root[n] = self.find(reader)
        groups: dict[fx.Node, Unit] = defaultdict(list)
        for n in self.calls:
            if n not in last:
                groups[self.find(n)].append(n)
        return [*self.ordered(list(groups.values())), *([list(reversed(last))] if last else [])]

    def find(self, n: fx.Node) -> fx.Node:
        """Return the representative of a call's unit. Calls that stand alone represent themselves."""
        while self.root[n] is not n:
            self.root[n] = self.root[self.root[n]]
            n = self.root[n]
        return n

    def depths(self) -> dict[fx.Node, int]:
        depth: dict[fx.Node, int] = {}
        for n in self.calls:
            copy, deepest = n.meta.get("copy", 0), 0
            for x in self.reads[n]:
                deepest = max(deepest, depth[x] + (x in self.alone or x.meta.get("copy", 0) != copy))
            depth[n] = deepest
        return depth

    def phases(self) -> dict[fx.Node, int]:
        """Return the latest phase on the paths to each call. Like depth, it never decreases along a path."""
        latest: dict[fx.Node, int] = {}
        for n in self.calls:
            own = PHASES.index("recompute" if "recompute" in n.meta else n.meta.get("phase", ""))
            latest[n] = max([own, *[latest[x] for x in self.reads[n]]])
        return latest

    def firsts(self) -> dict[fx.Node, float]:
        """Return the index of the first collective that needs each call."""
        first: dict[fx.Node, float] = {}
        for i, n in reversed(list(enumerate(self.calls))):
            behind = [first[user] for user in n.users if user in first]
            first[n] = i if n.target in COLLECTIVES else min(behind, default=inf)
        return first

    def ordered(self, groups: list[Unit]) -> list[Unit]:
        place = {n: i for i, n in enumerate(self.calls)}
        waits = needs(groups)
        behind: list[list[int]] = [[] for _ in groups]
        for i, before in enumerate(waits):
            for j in before:
                behind[j].append(i)
        ends = [max((place[n] for n in unit if not _is_free(n)), default=place[unit[-1]]) for unit in groups]
        ready = [(ends[i], i) for i in range(len(groups)) if not waits[i]]
        heapify(ready)
        order = []
        while ready:
            _, i = heappop(ready)
            order.append(groups[i])
            for j in behind[i]:
                waits[j].discard(i)
                if not waits[j]:
                    heappush(ready, (ends[j], j))
        assert len(order) == len(groups), "units wait for each other"
        return order
