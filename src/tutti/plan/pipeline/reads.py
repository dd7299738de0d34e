"""What the nodes of a graph read, if nodes that every stage can compute itself are left out."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from functools import cached_property

from torch import fx

from tutti.ir.costs import FREE
from tutti.ir.kind import CALL_INPUTS, kind_of
from tutti.ir.step_graph import StepGraph


class Reads:
    """The operands of each node of a step, looking through copied nodes.

    Views, and nodes that depend only on the batch, constants and the step's numbers, are copied: each stage that reads
    them computes them itself.

    placed: names of inputs that have a home stage, even if every stage could have them.
    """

    def __init__(self, step: StepGraph, placed: Iterable[str] = ()):
        self.step = step
        self.everywhere = {name for name in step.inputs if _is_given(step, name)} - set(placed)
        constant = {step.inputs[name] for name in self.everywhere if name != "seed"}  # random numbers are drawn once
        self.copied: set[fx.Node] = set()
        self.behind: dict[fx.Node, list[fx.Node]] = {}  # the nodes that are read in place of each node
        for name, node in step.inputs.items():
            self.behind[node] = [] if name in self.everywhere else [node]
        for node in step.calls:
            reads = node.all_input_nodes
            if all(x in constant for x in reads):
                constant.add(node)
            part = node.target is operator.getitem
            if node in constant or (reads[0] in self.copied if part else node.target in FREE):
                self.copied.add(node)
            self.behind[node] = self.of(node) if node in self.copied else [node]

    def of(self, node: fx.Node) -> list[fx.Node]:
        """The calls and inputs that a node reads, except inputs that every stage has."""
        return list(dict.fromkeys(x for read in node.all_input_nodes for x in self.behind[read]))

    @cached_property
    def calls(self) -> list[fx.Node]:
        """All calls that are not copied, in order."""
        return [node for node in self.step.calls if node not in self.copied]


def _is_given(step: StepGraph, name: str) -> bool:
    """Whether every stage has this input: an argument of each call, or a buffer that never changes."""
    kind = kind_of(name)
    return kind in CALL_INPUTS or (kind == "buffer" and name not in step.outputs)


def covering(node: fx.Node, named: Mapping[str, int]) -> str | None:
    """The longest name that covers a node; None if no name does."""
    if node.meta["name"] in named:
        return node.meta["name"]
    path = node.meta["path"]
    while path and path not in named:
        path = path.rpartition(".")[0]
    return path if path in named else None


def check_names(named: Mapping[str, int], used: Iterable[str | None]) -> None:
    """Raise ValueError if a name covers no node."""
    if unknown := named.keys() - set(used):
        name = next(name for name in named if name in unknown)
        raise ValueError(f"the plan names a stage of {name!r}, which computes nothing in the forward pass")
