"""Exact subgraph isomorphism: find the occurrences of a small graph of operators, the pattern, in a large one.

A pattern node matches a node if both are the same operator, in the same phase, with the same shape, dtype and literals,
and if their operands match. The operands of a sum or product of two tensors may be swapped. The pattern's placeholders
match anything of their shape and dtype. A search that is not `exact` ignores literals and shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
COMMUTATIVE = {aten.add.Tensor, aten.mul.Tensor}


def leaves(node: fx.Node) -> list[Any]:
    """Flatten the arguments of a node. Each list is preceded by its length."""
    flat: list[Any] = []
    for argument in (*node.args, *node.kwargs.values()):
        if isinstance(argument, (list, tuple)):
            flat.append(len(argument))
            flat += argument
        else:
            flat.append(argument)
    return flat


class SubgraphMatcher:
    """`mapping` maps pattern nodes to nodes while a generator is suspended at a match."""

    def __init__(self, calls: Iterable[fx.Node], exact: bool = True):
        self.calls, self.exact = list(calls), exact
        self.mapping: dict[fx.Node, fx.Node] = {}
        self.taken: set[fx.Node] = set()

    def matches(self, first: fx.Node, at: fx.Node) -> Iterator[None]:
        """All matches of the pattern in which its node `first` is `at`."""
        for _ in self._stands(first, at):
            yield from self._grown()

    def _grown(self) -> Iterator[None]:
        """Extend the match by a reader of a matched node, starting from the node with the fewest readers."""
        best: tuple[int, fx.Node, fx.Node] | None = None
        for node in self.calls:
            if node in self.mapping:
                continue
            for operand in node.all_input_nodes:
                matched = self.mapping.get(operand)
                if matched is not None and (best is None or len(matched.users) < best[0]):
                    best = len(matched.users), node, matched
        if best is None:
            if len(self.taken) == len(self.calls):
                yield
            return
        _, node, matched = best
        for user in list(matched.users):
            for _ in self._stands(node, user):
                yield from self._grown()

    def _stands(self, node: fx.Node, at: Any) -> Iterator[None]:
        """Match a pattern node with a node, and their operands."""
        if node in self.mapping:
            if self.mapping[node] is at:
                yield
            return
        if not isinstance(at, fx.Node) or (self.exact and node.meta["val"] != at.meta["val"]):
            return
        if node.op == "placeholder":
            self.mapping[node] = at
            yield
            del self.mapping[node]
            return
        if at.target != node.target or at in self.taken or at.meta["phase"] != node.meta["phase"]:
            return
        ours, theirs = leaves(node), leaves(at)
        if len(ours) != len(theirs):
            return
        self.mapping[node] = at
        self.taken.add(at)
        yield from self._operands(ours, theirs)
        if node.target in COMMUTATIVE and all(isinstance(x, fx.Node) for x in theirs[:2]) and theirs[0] != theirs[1]:
            yield from self._operands(ours, [theirs[1], theirs[0], *theirs[2:]])
        del self.mapping[node]
        self.taken.remove(at)

    def _operands(self, ours: list[Any], theirs: list[Any]) -> Iterator[None]:
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if isinstance(a, fx.Node):
                for _ in self._stands(a, b):
                    yield from self._operands(ours[i + 1 :], theirs[i + 1 :])
                return
            if isinstance(b, fx.Node) or (self.exact and (type(a) is not type(b) or a != b)):
                return
        yield
