"""Exact subgraph isomorphism: where a small graph of operators, the pattern, lies inside of a large one.

A pattern node stands for a node of the large graph if both are the same operator, in the same phase, of the same shape
and dtype, on the same literals, and if their operands stand for each other; the operands of a sum or product of two
tensors may be swapped. The pattern's placeholders stand for anything of their shape and dtype. Literals and shapes are
left out of account in a search that is not `exact`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
COMMUTATIVE = {aten.add.Tensor, aten.mul.Tensor}


def leaves(node: fx.Node) -> list[Any]:
    """The arguments in a row, the lengths of lists among them."""
    found: list[Any] = []
    for argument in (*node.args, *node.kwargs.values()):
        if isinstance(argument, (list, tuple)):
            found.append(len(argument))
            found += argument
        else:
            found.append(argument)
    return found


class Search:
    """`mapping` is what pattern nodes stand for, while one of the generators is suspended at a match."""

    def __init__(self, calls: Iterable[fx.Node], exact: bool = True):
        self.calls, self.exact = list(calls), exact
        self.mapping: dict[fx.Node, fx.Node] = {}
        self.taken: set[fx.Node] = set()

    def matches(self, first: fx.Node, at: fx.Node) -> Iterator[None]:
        """All ways in which the pattern lies so that its node `first` is `at`."""
        for _ in self._stands(first, at):
            yield from self._grown()

    def _grown(self) -> Iterator[None]:
        """Go on with what reads something found, where it is read least."""
        best: tuple[int, fx.Node, fx.Node] | None = None
        for node in self.calls:
            if node in self.mapping:
                continue
            for operand in node.all_input_nodes:
                found = self.mapping.get(operand)
                if found is not None and (best is None or len(found.users) < best[0]):
                    best = len(found.users), node, found
        if best is None:
            if len(self.taken) == len(self.calls):
                yield
            return
        _, node, found = best
        for user in list(found.users):
            for _ in self._stands(node, user):
                yield from self._grown()

    def _stands(self, node: fx.Node, at: Any) -> Iterator[None]:
        """Let a pattern node stand for a node, and its operands for that one's."""
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
