"""Loops: a dim can be split if every operator of the sub-graph can split it without communication.

Such a dim is propagated through the rules of the sub-graph: batch rows of a recurrent cell, environments of a rollout,
independent heads. A sum over it, such as a gradient of weights, is a partial sum, also as a carry. Time cannot be
split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from tutti.ir.loops import LOOPS, Body, Branch, Loop, Scan, While
from tutti.ir.spec import Spec
from tutti.ops.registry import LOOP_RULES, operands, rule_of, source, specs
from tutti.ops.rule import SAME, Rule

Element = tuple  # a dim: ("in", operand, dim), ("out", output, dim) or (body, node, output, dim)


@dataclass
class Factor:
    """A dim that can be split.

    operands, outputs: its dim in each, or None if unsplit or a partial sum. summed: outputs that are partial sums.
    carries: carries that are partial sums. factors, linear: by body and node, the factor of its rule that is split, and
    the operands that are partial sums.
    """

    name: str
    operands: list[int | None]
    outputs: list[int | None]
    summed: set[int] = field(default_factory=set)
    carries: set[int] = field(default_factory=set)
    factors: dict[tuple[int, fx.Node], str] = field(default_factory=dict)
    linear: dict[tuple[int, fx.Node], frozenset[int]] = field(default_factory=dict)


@lru_cache(maxsize=1024)
def loop_rule(operator: Any) -> str:
    """The notation of a loop's rule."""
    loop, factors = LOOPS[operator], loop_factors(operator)

    def dims(spec: Spec, name: str, number: int, places: list[list[int | None]], time: bool) -> str:
        tokens = []
        for dim, size in enumerate(spec.shape):
            split = [f.name for f, at in zip(factors, places, strict=True) if at[number] == dim]
            whole = "t!" if time and dim == 0 else f"{name}{number}_{dim}!"
            tokens.append(f"{split[0]}*" if split else "1" if size == 1 else whole)
        return " ".join(tokens)

    left = [
        dims(x, "i", i, [f.operands for f in factors], i in loop.timed_operands)
        for i, x in enumerate(_operand_specs(loop))
    ]
    right = []
    for i, x in enumerate(loop.outputs):
        mark = "" if any(i in f.summed for f in factors) else "="
        right.append(mark + dims(x, "o", i, [f.outputs for f in factors], i in loop.timed_outputs))
    return f"{', '.join(left)} -> {', '.join(right)}"


@lru_cache(maxsize=1024)
def loop_factors(operator: Any) -> list[Factor]:
    """The dims of a loop that can be split, in the order of its operands."""
    loop = LOOPS[operator]
    classes = _Classes(loop)
    factors = []
    for members in classes.whole():
        factor = _factor(loop, members, f"c{len(factors)}")
        if factor is not None and _propagate(loop, classes, members, factor):
            factors.append(factor)
    return factors


def _operand_specs(loop: Loop) -> list[Spec]:
    if isinstance(loop, Scan):
        inputs = enumerate(loop.body.inputs)
        return [Spec((loop.length, *x.shape), x.dtype) if i in loop.timed_operands else x for i, x in inputs]
    if isinstance(loop, While):
        return loop.body.inputs
    return [Spec((), torch.bool), *loop.then.inputs]


class _Classes:
    """Classes of dims of a loop's sub-graphs that are split together."""

    def __init__(self, loop: Loop):
        self.parent: dict[Element, Element] = {}
        self.fixed: set[Element] = set()  # dims that cannot be split
        self.sizes: dict[Element, int] = {}
        self.rules: dict[tuple[int, fx.Node], Rule | None] = {}
        self.places: list[dict[fx.Node, int]] = []
        for b, body in enumerate(loop.sub_graphs):
            self.places.append({node: i for i, node in enumerate(body.step.inputs.values())})
            for node in body.step.calls:
                if node is source(node)[0]:
                    self._follow(b, node)
            if not (isinstance(loop, While) and b == 0):
                for i, node in enumerate(body.step.outputs.values()):
                    for dim in range(len(node.meta["val"].shape)):
                        self._join(("out", i, dim), self.element(b, node, dim))
        for i in range(loop.carries):
            for dim in range(len(loop.outputs[i].shape)):
                self._join(("in", i, dim), ("out", i, dim))

    def element(self, b: int, node: fx.Node, dim: int) -> Element:
        maker, index = source(node)
        key = ("in", self.places[b][maker], dim) if maker in self.places[b] else (b, maker, index, dim)
        self.sizes[key] = node.meta["val"].shape[dim]
        return key

    def _follow(self, b: int, node: fx.Node) -> None:
        rule = self.rules[b, node] = rule_of(node)
        ins = [[self.element(b, x, d) for d in range(len(x.meta["val"].shape))] for x in operands(node)]
        outs = [[(b, node, i, d) for d in range(len(s.shape))] for i, s in enumerate(specs(node))]
        for i, spec in enumerate(specs(node)):
            self.sizes |= {(b, node, i, d): n for d, n in enumerate(spec.shape)}
        if rule is None:
            self.fixed |= {x for group in (*ins, *outs) for x in group}
            return
        first: dict[str, list[Element]] = {}
        inner: set[str] = set()
        for elements, dims in zip([*ins, *outs], [*rule.inputs, *rule.outputs], strict=True):
            for element, factors in zip(elements, dims, strict=False):
                if not factors:
                    self.fixed.add(element)
                    continue
                first.setdefault(factors[0], []).append(element)
                inner |= set(factors[1:])
        for name, elements in first.items():
            for element in elements[1:]:
                self._join(elements[0], element)
            local = name in rule.local and node.target not in LOOPS
            if name in rule.whole or local or name in inner:
                self.fixed.add(elements[0])

    def root(self, x: Element) -> Element:
        while (above := self.parent.get(x, x)) != x:
            x = above
        return x

    def _join(self, a: Element, b: Element) -> None:
        for x in (a, b):
            self.parent.setdefault(x, x)
        self.parent[self.root(b)] = self.root(a)

    def whole(self) -> Iterator[set[Element]]:
        """Classes of equal size without a dim that cannot be split."""
        groups: dict[Element, set[Element]] = {}
        for x in self.parent:
            groups.setdefault(self.root(x), set()).add(x)
        fixed = {self.root(x) for x in self.fixed}
        for at, members in groups.items():
            sizes = {self.sizes[x] for x in members if x in self.sizes}
            if at not in fixed and len(sizes) == 1 and sizes != {1}:
                yield members


def _factor(loop: Loop, members: set[Element], name: str) -> Factor | None:
    """The positions of a class in the operands and outputs of a loop. None if it occurs twice in one, or nowhere."""
    shift = int(isinstance(loop, Branch))  # behind the condition
    ins: list[int | None] = [None] * len(_operand_specs(loop))
    outs: list[int | None] = [None] * len(loop.outputs)
    for kind, i, dim in [x for x in members if x[0] in ("in", "out")]:
        places, timed = (ins, loop.timed_operands) if kind == "in" else (outs, loop.timed_outputs)
        at = i + shift if kind == "in" else i
        if places[at] is not None:
            return None
        places[at] = dim + (i in timed)
    return Factor(name, ins, outs) if any(x is not None for x in ins) else None


def _propagate(loop: Loop, classes: _Classes, members: set[Element], factor: Factor) -> bool:
    """Determine which values are partial sums. False if an operator needs an unsplit one."""
    while True:
        before = set(factor.carries)
        for b, body in enumerate(loop.sub_graphs):
            summed = _partial_sums(b, body, classes, members, factor)
            if summed is None:
                return False
            if isinstance(loop, While) and b == 0:
                if summed:
                    return False
                continue
            factor.summed |= summed
        factor.carries |= {i for i in factor.summed if i < loop.carries}
        if factor.carries == before:
            return True


def _partial_sums(b: int, body: Body, classes: _Classes, members: set[Element], factor: Factor) -> set[int] | None:
    """The outputs of a sub-graph that are partial sums, or None if it would have to communicate."""
    partial: set[tuple[fx.Node, int]] = {(x, 0) for x, i in classes.places[b].items() if i in factor.carries}
    for node in body.step.calls:
        if node is not source(node)[0]:
            continue
        rule = classes.rules[b, node]
        read = [i for i, x in enumerate(operands(node)) if source(x) in partial]
        splits = _splits(b, node, rule, classes, members)
        if len(splits) > 1:  # one class as two dims of an operator, as in x @ x.t()
            return None
        split = next(iter(splits), None)
        if split is None:
            if not read:
                continue
            sets = [x for x in (rule.linear if rule else ()) if set(read) <= x]
            if not sets:
                return None
            factor.linear[b, node] = min(sets, key=len)
            partial |= {(node, i) for i in range(len(specs(node)))}
            continue
        assert rule is not None
        contracted = [i for i, dims in enumerate(rule.outputs) if rule.position(dims, split) is None]
        free = not any(rule.position(dims, split) for dims in rule.outputs)
        if any(not (free and i in rule.added) for i in read):
            return None
        factor.factors[b, node] = split
        operation = rule.combine.get(split, "sum")
        for i in contracted:
            if i in rule.combined or operation == SAME:
                continue
            if operation != "sum":
                return None
            partial.add((node, i))
    return {i for i, node in enumerate(body.step.outputs.values()) if source(node) in partial}


def _splits(b: int, node: fx.Node, rule: Rule | None, classes: _Classes, members: set[Element]) -> set[str]:
    """The factors of an operator's rule that correspond to a class."""
    if rule is None:
        return set()
    outs = [[(b, node, i, d) for d in range(len(dims))] for i, dims in enumerate(rule.outputs)]
    read = zip(operands(node), rule.inputs, strict=True)
    ins = [[classes.element(b, x, d) for d in range(len(dims))] for x, dims in read]
    return {
        factors[0]
        for elements, dims in zip([*ins, *outs], [*rule.inputs, *rule.outputs], strict=True)
        for element, factors in zip(elements, dims, strict=True)
        if factors and element in members
    }


LOOP_RULES |= dict.fromkeys((Scan, While, Branch), lambda node: loop_rule(node.target))
