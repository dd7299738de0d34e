"""Operators with sub-graphs: a scan over a leading dim, a loop that runs while a condition holds, and a branch.

Each distinct sub-graph makes one operator, `tutti_loops::scan_<digest>(Tensor[] operands) -> Tensor[]`, which fake
tensors, rules and Programs treat like any other. Its operands are the carries, the scanned tensors, and everything else
that the sub-graph reads. `tracing.trace.loop_capture` captures sub-graphs, `ops.loops` splits them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from tutti.ir.op_info import FLOPS
from tutti.ir.spec import Spec
from tutti.ir.step_graph import StepGraph

ITERATIONS = 16  # assumed iterations of a while loop, for prices


@dataclass(frozen=True)
class Body:
    """A sub-graph. step: its inputs and outputs are named `in:0`, `in:1`, ... and `out:0`, ....

    raw: the graph as traced, for differentiation; its placeholders stand for the inputs at `places`. None for a local
    part.
    """

    step: StepGraph
    raw: fx.Graph | None = None
    places: tuple[int, ...] = ()

    @cached_property
    def inputs(self) -> list[Spec]:
        return [node.meta["val"] for node in self.step.inputs.values()]

    @cached_property
    def outputs(self) -> list[Spec]:
        return [node.meta["val"] for node in self.step.outputs.values()]

    @cached_property
    def text(self) -> str:
        """A text that is equal for sub-graphs with equal outputs and gradients."""
        lines = [repr(self.inputs), repr(self.places)]
        for graph in (self.step.graph, self.raw):  # `raw` decides where gradients flow
            number = {node: Number(i) for i, node in enumerate(graph.nodes)} if graph else {}
            for node in number:
                args, kwargs = fx.map_arg((node.args, node.kwargs), number.__getitem__)  # pyright: ignore
                target = node.target if node.op == "call_function" else ""
                marks = [node.meta.get(key) for key in ("grad", "differentiable")]
                lines.append(f"{node.op} {target} {args} {kwargs} {marks}")
        return "\n".join(lines)

    @cached_property
    def run(self) -> Callable[..., tuple[Tensor, ...]]:
        """The function from inputs to outputs."""
        return fx.GraphModule({}, self.step.graph).forward

    @cached_property
    def flops(self) -> int:
        return self.step.flops

    @cached_property
    def bytes(self) -> int:
        return sum(node.meta["bytes"] for node in self.step.calls)


class Number(int):
    """The index of a node in the text of a graph."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


class _WithSubGraphs:
    """The common part of loops and branches.

    timed_operands, timed_outputs: those with a scan's time as dim 0, which the sub-graph does not see.
    """

    names: ClassVar[tuple[str, ...]]  # names of the attributes with sub-graphs
    timed_operands = timed_outputs = range(0)

    @property
    def sub_graphs(self) -> list[Body]:
        return [getattr(self, name) for name in self.names]

    def with_sub_graphs(self, bodies: Sequence[Body]) -> Any:
        return replace(self, **dict(zip(self.names, bodies, strict=True)))  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Scan(_WithSubGraphs):
    """`carry, y = body(carry, x, *rest)` for each x along dim 0, in reverse order with `reverse`.

    Operands: `carries` carries, `scanned` tensors with `length` rows, the rest. Outputs: the last carries, and every y
    stacked along dim 0. keeps: whether the last outputs are the carries before each step.
    """

    body: Body
    carries: int
    scanned: int
    length: int
    reverse: bool = False
    keeps: bool = False
    kind, names = "scan", ("body",)

    @property
    def bodies(self) -> list[tuple[Body, int]]:
        """Sub-graphs, with the number of times each runs."""
        return [(self.body, self.length)]

    @property
    def timed_operands(self) -> range:
        return range(self.carries, self.carries + self.scanned)

    @property
    def timed_outputs(self) -> range:
        return range(self.carries, len(self.body.outputs))

    @property
    def outputs(self) -> list[Spec]:
        carries, ys = self.body.outputs[: self.carries], self.body.outputs[self.carries :]
        return carries + [Spec((self.length, *y.shape), y.dtype) for y in ys]

    @property
    def text(self) -> str:
        return f"{self.carries} {self.scanned} {self.length} {self.reverse} {self.keeps}\n{self.body.text}"

    def run(self, operands: Sequence[Tensor]) -> list[Tensor]:
        carries = list(operands[: self.carries])
        xs = [x.unbind(0) for x in operands[self.carries : self.carries + self.scanned]]
        rest = operands[self.carries + self.scanned :]
        like = operands[0]
        ys = [torch.empty(spec.shape, dtype=spec.dtype, device=like.device) for spec in self.outputs[self.carries :]]
        rows = [y.unbind(0) for y in ys]
        for t in reversed(range(self.length)) if self.reverse else range(self.length):
            outputs = self.body.run(*carries, *[x[t] for x in xs], *rest)
            carries = list(outputs[: self.carries])
            for row, y in zip(rows, outputs[self.carries :], strict=True):
                row[t].copy_(y)
        return carries + ys


@dataclass(frozen=True)
class While(_WithSubGraphs):
    """`while condition(*carries, *rest): carries = body(*carries, *rest)`. Outputs: the last carries.

    expected: number of iterations, for prices.
    """

    condition: Body
    body: Body
    carries: int
    expected: int = ITERATIONS
    kind, names = "while", ("condition", "body")

    @property
    def bodies(self) -> list[tuple[Body, int]]:
        return [(self.condition, self.expected + 1), (self.body, self.expected)]

    @property
    def outputs(self) -> list[Spec]:
        return self.body.outputs

    @property
    def text(self) -> str:
        return f"{self.carries} {self.expected}\n{self.condition.text}\n{self.body.text}"

    def run(self, operands: Sequence[Tensor]) -> list[Tensor]:
        carries, rest = [x.clone() for x in operands[: self.carries]], operands[self.carries :]
        while self.condition.run(*carries, *rest)[0]:
            carries = list(self.body.run(*carries, *rest))
        return carries


@dataclass(frozen=True)
class Branch(_WithSubGraphs):
    """`then(*rest) if condition else otherwise(*rest)`. Operands: the condition, a 0-d bool; the rest."""

    then: Body
    otherwise: Body
    kind, names = "branch", ("then", "otherwise")
    carries = 0

    @property
    def bodies(self) -> list[tuple[Body, int]]:
        """The more expensive branch, so that the price is an upper bound."""
        return [(max(self.then, self.otherwise, key=lambda body: body.flops + body.bytes), 1)]

    @property
    def outputs(self) -> list[Spec]:
        return self.then.outputs

    @property
    def text(self) -> str:
        return f"{self.then.text}\n{self.otherwise.text}"

    def run(self, operands: Sequence[Tensor]) -> list[Tensor]:
        body = self.then if operands[0] else self.otherwise
        return list(body.run(*operands[1:]))


Loop = Scan | While | Branch

LOOPS: dict[Any, Loop] = {}  # by operator
_library = torch.library.Library("tutti_loops", "FRAGMENT")


def loop_operator(loop: Loop) -> torch._ops.OpOverload:
    """The operator of a loop. Equal loops share one."""
    name = f"{loop.kind}_{hashlib.sha256(loop.text.encode()).hexdigest()[:16]}"
    if not hasattr(torch.ops.tutti_loops, name):
        _library.define(f"{name}(Tensor[] operands) -> Tensor[]")
        _library.impl(name, lambda operands: loop.run(operands), "CompositeExplicitAutograd")
        _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"tutti_loops::{name}", lambda operands: _empty(loop, operands), lib=_library)
    operator = getattr(torch.ops.tutti_loops, name).default
    LOOPS.setdefault(operator, loop)
    FLOPS.setdefault(operator, lambda node: sum(times * body.flops for body, times in loop.bodies))
    return operator


def _empty(loop: Loop, operands: Sequence[Tensor]) -> list[Tensor]:
    return [operands[0].new_empty(spec.shape, dtype=spec.dtype) for spec in loop.outputs]


def compiles(target: object) -> bool:
    """Return whether Inductor can compile this loop. It miscompiles branches within loops (torch 2.13)."""
    loop = LOOPS.get(target)
    return loop is not None and not _branches(loop)


def _branches(loop: Loop) -> bool:
    calls = [node for body in loop.sub_graphs for node in body.step.calls if node.target in LOOPS]
    return isinstance(loop, Branch) or any(_branches(LOOPS[node.target]) for node in calls)
