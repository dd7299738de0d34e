"""Parts of a traced graph that depend on no input: position indices, masks, tables of frequencies.

A model may make such a tensor in its first call and keep it, in an attribute, a global variable or the cache of a
function. A later call reads what the first one made, and means the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from tutti.compat import FakeTensor
from tutti.ir.values import base_of, written_operands

LARGEST_SHOWN = 64  # elements of a constant that are compared by value; others are compared by identity


class InputFree:
    """Which nodes of a graph depend on no input, and what they are computed from."""

    def __init__(self, graph: fx.Graph, constants: Mapping[str, torch.Tensor]):
        self.constants = constants
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.writers: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)  # by what they write into
        self.free: set[fx.Node] = set()  # by their operands; `calls` looks at what is written into these, too
        self.texts: dict[tuple[fx.Node, ...], str] = {}
        for node in graph.nodes:
            for written in written_operands(node):
                self.writers[base_of(written)].append(node)
            if node.op == "get_attr" or (node.op == "call_function" and self._computes(node)):
                self.free.add(node)

    def _computes(self, node: fx.Node) -> bool:
        is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        return not is_random and all(x in self.free for x in node.all_input_nodes)

    def calls(self, node: fx.Node, before: fx.Node | None = None) -> tuple[fx.Node, ...] | None:
        """The nodes that make the value of one at the point `before`, in order; None where it depends on an input."""
        if node not in self.free:
            return None
        end = self.position[before] if before is not None else len(self.position)
        needed, todo = set(), [node]
        while todo:
            x = todo.pop()
            if x in needed:
                continue
            if x not in self.free:
                return None
            needed.add(x)
            todo += [*x.all_input_nodes, *(w for w in self.writers[base_of(x)] if self.position[w] < end)]
        return tuple(sorted(needed, key=self.position.__getitem__))

    def text(self, node: fx.Node, before: fx.Node) -> str | None:
        """The value of a node at a point as text, the same for equal computations; None where it has inputs."""
        calls = self.calls(node, before)
        if calls is None:
            return None
        key = (node, *calls)
        if key not in self.texts:
            order = self._order(node, set(calls))
            lines = [line(x, order, self.constants) + self._written_before(x, order) for x in order]
            self.texts[key] = f"{{{'; '.join(lines)} -> {order[node]}}}"
        return self.texts[key]

    def _order(self, node: fx.Node, calls: set[fx.Node]) -> dict[fx.Node, int]:
        """Numbers of nodes: operands first, and after a node what writes into it, wherever they are in the graph."""
        order: dict[fx.Node, int] = {}
        todo, seen = [(node, False)], set()
        while todo:
            x, ready = todo.pop()
            if ready:
                order[x] = len(order)
                todo += [(w, False) for w in reversed(self.writers[x]) if w in calls]
            elif x not in seen:
                seen.add(x)
                base = [base_of(x)] if base_of(x) in calls else []
                todo += [(x, True), *((y, False) for y in reversed([*base, *x.all_input_nodes]))]
        return order

    def _written_before(self, node: fx.Node, calls: Mapping[fx.Node, int]) -> str:
        """How often the operands of a node have been written into before it."""
        counts = [sum(w in calls and self.position[w] < self.position[node] for w in self.writers[base_of(x)])
                  for x in node.all_input_nodes]  # fmt: skip
        return f" after {counts}" if any(counts) else ""


def line(node: fx.Node, names: Mapping[fx.Node, Any], constants: Mapping[str, torch.Tensor]) -> str:
    """A node as text; constants are named by what they hold."""
    if node.op == "get_attr":
        held = constants[str(node.target)]
        by_value = held.numel() <= LARGEST_SHOWN and not isinstance(held, FakeTensor)
        return f"{held.dtype} {held.tolist() if by_value else id(held)}"
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: f"%{names[x]}")  # pyright: ignore
    return f"{node.target} {args} {kwargs}"
