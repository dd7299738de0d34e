"""Parts of a traced graph that depend on no input: position indices, masks, frequency tables.

A model may compute such a tensor in its first call and cache it in an attribute, a global variable or a function's
cache. Later calls then read an equal tensor instead of computing it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from tutti.compat import FakeTensor
from tutti.ir.values import base_of, written_operands

LARGEST_SHOWN = 64  # elements: larger constants are compared by identity, not by value


class InputFree:
    """The nodes of a graph that depend on no input, and what they are computed from."""

    def __init__(self, graph: fx.Graph, constants: Mapping[str, torch.Tensor]):
        self.constants = constants
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.writers: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)  # by the tensor they write
        self.free: set[fx.Node] = set()  # judging by operands; `calls` also considers writes into these
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
        """The nodes that compute a node's value at the point `before`, in order. None if it depends on an input."""
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
        """A node's value at a point as text, equal for equal computations. None if it depends on an input."""
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
        """Indices of nodes: operands first, and after a node the calls that write into it, wherever they are."""
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
        """Format how often the operands of a node were written before it."""
        counts = [sum(w in calls and self.position[w] < self.position[node] for w in self.writers[base_of(x)])
                  for x in node.all_input_nodes]  # fmt: skip
        return f" after {counts}" if any(counts) else ""


def line(node: fx.Node, names: Mapping[fx.Node, Any], constants: Mapping[str, torch.Tensor]) -> str:
    """Format a node as text. Constants are named by their contents."""
    if node.op == "get_attr":
        constant = constants[str(node.target)]
        by_value = constant.numel() <= LARGEST_SHOWN and not isinstance(constant, FakeTensor)
        return f"{constant.dtype} {constant.tolist() if by_value else id(constant)}"
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: f"%{names[x]}")  # pyright: ignore
    return f"{node.target} {args} {kwargs}"
