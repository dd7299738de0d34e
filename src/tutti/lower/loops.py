"""The local part of a loop: its sub-graphs with operators on this rank's parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from tutti.ir.costs import annotate_costs
from tutti.ir.loops import LOOPS, Body, Branch, Loop, Scan, While, loop_operator
from tutti.ir.step_graph import StepGraph
from tutti.lower.collectives import COLLECTIVES
from tutti.lower.local_context import LocalContext
from tutti.ops.loops import Factor, bodies, loop_factors
from tutti.plan.choice import Choice
from tutti.plan.layout import Layout, Partial, Placement, Split
from tutti.plan.plan import Plan


@lru_cache(maxsize=1024)
def local_loop(operator: Any) -> Callable[..., list[Tensor]]:
    """The local computation of a loop, as `LOCAL` has those of other operators."""
    return partial(_local, operator)


def _local(operator: Any, here: LocalContext, operands: list[Tensor]) -> list[Tensor]:
    loop = LOOPS[operator]
    by_name = {factor.name: factor for factor in loop_factors(operator)}
    splits = {axis: (by_name[choice.factor], choice) for axis, choice in here.choices.items()}
    parts = [_part(loop, b, body, splits, here) for b, body in enumerate(bodies(loop))]
    operands = list(operands)
    for axis, (factor, _) in splits.items():
        for i in factor.carries if here.where[axis] else ():  # the first rank's part begins with all of the sum
            operands[i] = torch.zeros_like(operands[i])
    if isinstance(loop, Scan):
        own: Loop = replace(loop, body=parts[0])
    elif isinstance(loop, While):
        own = replace(loop, condition=parts[0], body=parts[1])
    else:
        own = replace(loop, then=parts[0], otherwise=parts[1])
    return loop_operator(own)(operands)


def _part(loop: Loop, b: int, body: Body, splits: dict[str, tuple[Factor, Choice]], here: LocalContext) -> Body:
    """A sub-graph on this rank's part."""
    from tutti.lower.shard import shard  # which computes loops by this file

    condition = isinstance(loop, While) and b == 0
    step, placed = body.step, int(isinstance(loop, Branch))
    scanned = range(loop.carries, loop.carries + loop.scanned) if isinstance(loop, Scan) else range(0)

    def input_placement(i: int, factor: Factor, outer: int) -> Placement | None:
        if i in factor.carries:
            return Partial()
        dim = factor.operands[i + placed]
        return None if dim is None else Split(dim - (i in scanned), outer)

    def output_placement(i: int, factor: Factor, outer: int) -> Placement | None:
        dim = factor.outputs[i]
        if dim is not None:
            return Split(dim - (isinstance(loop, Scan) and i >= loop.carries), outer)
        summed = any(i in other.summed for other in loop_factors_of(loop))
        return Partial() if summed or i in factor.carries else None

    inputs = {
        node.meta["label"]: _layout(splits, lambda f, o, i=i: input_placement(i, f, o))
        for i, node in enumerate(step.inputs.values())
    }
    outputs = {
        name: Layout() if condition else _layout(splits, lambda f, o, i=i: output_placement(i, f, o))
        for i, name in enumerate(step.outputs)
    }
    operators: dict[str, dict[str, Choice]] = {}
    for axis, (factor, choice) in splits.items():
        for (at, node), name in factor.factors.items():
            if at == b:
                operators.setdefault(node.meta["label"], {})[axis] = Choice(name, choice.outer)
        for (at, node), linear in factor.linear.items():
            if at == b:
                operators.setdefault(node.meta["label"], {})[axis] = Choice(linear=linear)
    program = shard(step, Plan(here.mesh, inputs, operators), here.rank, outputs)
    assert not any(node.target in COLLECTIVES for node in program.graph.nodes), "a loop's part communicates"
    graph = program.graph
    placeholders = {node.meta["input"]: node for node in graph.find_nodes(op="placeholder")}
    (output,) = graph.find_nodes(op="output")
    results = dict(zip(step.outputs, output.args[0], strict=True))
    own = StepGraph(graph, {name: placeholders[name] for name in step.inputs}, results, {}, step.device)
    annotate_costs(own)
    return Body(own)


def _layout(splits: dict[str, tuple[Factor, Choice]], placement: Callable[[Factor, int], Placement | None]) -> Layout:
    found = {axis: placement(factor, choice.outer) for axis, (factor, choice) in splits.items()}
    return Layout.of({axis: x for axis, x in found.items() if x is not None})


def loop_factors_of(loop: Loop) -> list[Factor]:
    return loop_factors(loop_operator(loop))
