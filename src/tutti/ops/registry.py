"""The table of all rules, and tables of what else splitting an operator changes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tutti.ir.loops import LOOPS
from tutti.ir.op_info import RULES, UNEVEN
from tutti.ir.spec import Spec
from tutti.ir.step_graph import Call
from tutti.ops.rule import Rule, parse

Notation = str | tuple[str, dict[str, int]]  # the notation, and sizes of factors that shapes do not determine
Maker = Callable[[fx.Node], Notation | None]  # for operators whose rule depends on their arguments

LOOP_RULES: dict[type, Maker] = {}  # of operators with sub-graphs, which are created at capture


@dataclass(frozen=True)
class Cut:
    """A mesh axis of size k that splits a factor of a call with a local computation. The argument of `sends`.

    inside: how many of the k ranks are in a node, for communication in two legs, between nodes and inside them; or 0.
    """

    node: Call
    rule: Rule
    factor: str
    k: int
    inputs: list[Spec]  # local, under all axes
    outputs: list[Spec]
    inside: int = 0

    def dim(self, operand: int) -> int:
        """The dim of an operand that holds the factor."""
        place = self.rule.position(self.rule.inputs[operand], self.factor)
        assert place is not None
        return place[0]


def rules(table: Mapping[Any, str | Maker]) -> None:
    """Add rules to the table; one operator has one rule."""
    for target, rule in table.items():
        assert target not in RULES, f"{target} has a rule already"
        RULES[target] = rule


def operands(node: fx.Node) -> list[fx.Node]:
    """The tensor arguments of a node in order, one per occurrence."""
    nodes: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), nodes.append)
    return nodes


def named(target: Any, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, defaults included."""
    schema = target._schema.arguments
    defaults = {a.name: a.default_value if a.has_default_value() else None for a in schema}
    return defaults | dict(zip((a.name for a in schema), args, strict=False)) | dict(kwargs)


def shape_of(argument: Call) -> tuple[int, ...]:
    """The shape of a tensor argument."""
    return argument.meta["val"].shape


def specs(node: fx.Node) -> list[Spec]:
    """The Specs of a node's outputs. An optional output that is not computed is a tensor without elements."""
    value = node.meta["val"]
    return [v or Spec((0,), None) for v in (value if isinstance(value, tuple) else (value,))]  # pyright: ignore


def source(node: fx.Node) -> tuple[fx.Node, int]:
    """The node that makes a tensor, and the index of the output."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return node.args[0], node.args[1]  # pyright: ignore[reportReturnType]
    return node, 0


def rule_of(node: fx.Node) -> Rule | None:
    """The rule of a call for its shapes and arguments, or None if the table has none that applies."""
    entry: Any = RULES.get(node.target)
    if node.target in LOOPS:
        entry = LOOP_RULES[type(LOOPS[node.target])]
    elif entry is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        entry = RULES[torch.Tag.pointwise]
    notation: Any = entry(node) if callable(entry) else entry
    if notation is None:
        return None
    line, sizes = notation if isinstance(notation, tuple) else (notation, {})
    try:
        rule = parse(line, [n.meta["val"].shape for n in operands(node)], [s.shape for s in specs(node)], **sizes)
    except ValueError as error:
        raise ValueError(f"{node.target}: {error}") from None
    return replace(rule, even=frozenset()) if node.target in UNEVEN else rule


def replicated(node: fx.Node) -> Rule:
    """The rule of an operator that cannot be split."""
    ins, outs = ([()] * len(operands(node)), [()] * len(specs(node)))
    return Rule("whole", tuple(ins), tuple(outs), {})
