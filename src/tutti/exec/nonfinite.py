"""Find the operator that made the first value that is not finite, by running the step once more, operator by operator.

Infinities alone are no fault: masks contain them. The search is for the first NaN and the infinity that caused it; if
there is no NaN, for the infinity that made the loss or the gradients infinite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from tutti.ir.kind import Kind, kind_of
from tutti.lower.collectives import COLLECTIVES, wait
from tutti.lower.program import Program


class NonFinite(ValueError):
    """The loss or a gradient of a step is not finite. Parameters, buffers and optimizer state are unchanged."""


@dataclass(frozen=True)
class Origin:
    """A finding of one rank. order: values received from elsewhere come last, the others by microbatch and operator."""

    order: tuple[bool, int, int]
    rank: int
    text: str


class Inspector:
    """Inspects all values of the Programs of this process. offset: added to the ranks of the Programs."""

    def __init__(self, offset: int = 0, logs: list[Log] | None = None):
        self.offset, self.logs = offset, [] if logs is None else logs

    def shifted(self, offset: int) -> Inspector:
        """The same inspector for Programs whose ranks begin at an offset."""
        return Inspector(offset, self.logs)

    def of(self, program: Program) -> Log:
        self.logs.append(Log(program.graph, program.rank + self.offset))
        return self.logs[-1]

    def begin(self) -> None:
        """Forget all findings."""
        for log in self.logs:
            log.begin()

    def first(self) -> str:
        """The first finding on any rank, in words. Every rank of a job must call it."""
        origins: Sequence[Origin | None] = [log.close() for log in self.logs]
        if dist.is_initialized() and dist.get_world_size() > 1:
            gathered: list = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, origins)
            origins = [origin for theirs in gathered for origin in theirs]
        nonfinite = [origin for origin in origins if origin]
        if not nonfinite:
            return (
                "every value is finite if operators run one by one, at level O0: compiled code rounds differently, or "
                "the norm of the gradients is more than float32 holds"
            )
        origin = min(nonfinite, key=lambda origin: (origin.order, origin.rank))
        return f"{origin.text}, on rank {origin.rank}"


class Log:
    """The log of one Program: called with every input and result, in order, in each run, until one is NaN."""

    def __init__(self, graph: fx.Graph, rank: int):
        self.rank = rank
        nodes = [node for node in graph.nodes if node.op != "output"]
        self.at = {node: i for i, node in enumerate(nodes)}
        self.outputs = graph.output_node().all_input_nodes
        self.begin()

    def begin(self) -> None:
        self.run = -1
        self.infinite: set[fx.Node] = set()
        self.origin: Origin | None = None

    def __call__(self, node: fx.Node, value: Any) -> None:
        if self.origin:
            return
        if self.at[node] == 0:
            self.close()
            self.run, self.infinite = self.run + 1, set()
        tensors = [x for x in (value if isinstance(value, tuple | list) else [value]) if isinstance(x, torch.Tensor)]
        tensors = [x for x in tensors if x.is_floating_point() or x.is_complex()]
        if any(x.isnan().any() for x in tensors):
            self.origin = self.origin_of(node, "NaN")
        elif any(x.isinf().any() for x in tensors):
            self.infinite.add(node)

    def close(self) -> Origin | None:
        """The finding, after all runs."""
        if not self.origin and (bad := next((x for x in self.outputs if x in self.infinite), None)):
            self.origin = self.origin_of(self.source(bad), "an infinity")
        return self.origin

    def source(self, node: fx.Node) -> fx.Node:
        """The first infinite value on a chain of infinite values that leads to this one."""
        while before := [x for x in node.all_input_nodes if x in self.infinite]:
            node = min(before, key=self.at.__getitem__)
        return node

    def origin_of(self, node: fx.Node, what: str) -> Origin:
        order = _is_given(node), self.run, self.at[node]
        if node.op == "placeholder":
            return Origin(order, self.rank, f"{_name(node)} holds {what}")
        of = "finite operands"
        if infinite := [x for x in node.all_input_nodes if x in self.infinite]:
            first = self.source(infinite[0])
            of = f"infinities, the first of which {_name(first)} " + (
                "made" if first.op == "call_function" else "holds"
            )
        return Origin(order, self.rank, f"{_name(node)} made {what} of {of}")


def _is_given(node: fx.Node) -> bool:
    """Whether a value comes from other ranks, or from another part of the step."""
    passed_in = kind_of(node.meta.get("input", "")) in (Kind.VALUE, Kind.GRAD)
    return passed_in or node.target in COLLECTIVES or node.target is wait


def _name(node: fx.Node) -> str:
    return node.meta["input"] if node.op == "placeholder" else node.meta.get("label") or node.name
