"""The local part of a loop: its sub-graphs with operators on this rank's parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from tutti.ir.loops import LOOPS, Body, Branch, Loop, While, loop_operator
from tutti.ir.step_graph import StepGraph
from tutti.lower.collectives import COLLECTIVES
from tutti.lower.local_context import LocalContext
from tutti.lower.program import Program
from tutti.ops.costs import annotate_costs
from tutti.ops.loops import Factor, loop_factors
from tutti.plan.layouts.choice import Choice
from tutti.plan.layouts.layout import Layout, Partial, Placement, Split
from tutti.plan.plan import Plan


@lru_cache(maxsize=1024)
def local_loop(operator: Any, shard: Callable[..., Program]) -> Callable[..., list[Tensor]]:
    """The local computation of a loop, in the form of the others in `LOCAL`. shard: `lower.shard.shard`, which lowers
    its sub-graphs."""
    return partial(_local, operator, shard)


def _local(operator: Any, shard: Callable[..., Program], here: LocalContext, operands: list[Tensor]) -> list[Tensor]:
    loop = LOOPS[operator]
    by_name = {factor.name: factor for factor in loop_factors(operator)}
    summed = {i for factor in by_name.values() for i in factor.summed}
    splits = {axis: (by_name[choice.factor], choice) for axis, choice in here.choices.items()}
    parts = [_part(loop, b, body, splits, summed, shard, here) for b, body in enumerate(loop.sub_graphs)]
    operands = list(operands)
    for axis, (factor, _) in splits.items():
        for i in factor.carries if here.where[axis] else ():  # the first rank has the full sum
            operands[i] = torch.zeros_like(operands[i])
    return loop_operator(loop.with_sub_graphs(parts))(operands)


def _part(loop: Loop, b: int, body: Body, splits: dict[str, tuple[Factor, Choice]], summed: set[int],
          shard: Callable[..., Program], here: LocalContext) -> Body:  # fmt: skip
    """The local part of a sub-graph. summed: outputs of the loop that are partial sums if any factor is split."""
    condition = isinstance(loop, While) and b == 0
    step, placed = body.step, int(isinstance(loop, Branch))

    def input_placement(i: int, factor: Factor, outer: int) -> Placement | None:
        if i in factor.carries:
            return Partial()
        dim = factor.operands[i + placed]
        return None if dim is None else Split(dim - (i in loop.timed_operands), outer)

    def output_placement(i: int, factor: Factor, outer: int) -> Placement | None:
        dim = factor.outputs[i]
        if dim is not None:
            return Split(dim - (i in loop.timed_outputs), outer)
        return Partial() if i in summed else None

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
    program = shard(step, Plan(here.mesh, inputs, operators, node_size=here.node_size), here.rank, outputs)
    assert not any(node.target in COLLECTIVES for node in program.graph.nodes), "a loop's part communicates"
    graph = program.graph
    placeholders = {node.meta["input"]: node for node in graph.find_nodes(op="placeholder")}
    (output,) = graph.find_nodes(op="output")
    results = dict(zip(step.outputs, output.args[0], strict=True))
    own = StepGraph(graph, {name: placeholders[name] for name in step.inputs}, results, {}, step.device)
    annotate_costs(own)
    return Body(own)


def _layout(splits: dict[str, tuple[Factor, Choice]], placement: Callable[[Factor, int], Placement | None]) -> Layout:
    placements = {axis: placement(factor, choice.outer) for axis, (factor, choice) in splits.items()}
    return Layout.of({axis: x for axis, x in placements.items() if x is not None})
