"""Finds the experts of a model: parameters with one matrix per expert, and the operators that use them.

Experts are recognized by their readers: the fused operator of `tutti.nn.experts.experts`, or a batched product whose
batch dim counts experts (with a capacity, between `dispatch` and `combine` of `tutti.nn.experts.slots`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch

import tutti.nn.experts.experts
import tutti.nn.experts.slots  # noqa: F401  (registers the operators)
from tutti.hardware import Cluster
from tutti.ir.step_graph import UPDATE
from tutti.nn.experts.route import expected_rows
from tutti.plan.layouts.choice import Choices
from tutti.plan.layouts.layout import Mesh, extent, inside_node
from tutti.plan.layouts.problem import Edge, Operator, Problem

aten, ops = torch.ops.aten, torch.ops.tutti
# The operands that are the experts' matrices.
FUSED: dict[object, tuple[int, ...]] = {ops.experts.default: (3, 4), ops.experts_backward.default: (4, 5)}
MANY = 1 << 24  # tokens, at which the latency of messages does not count
ROUTED = {ops.slots.default, ops.dispatch.default, ops.combine.default, ops.slot_products.default}


class Experts:
    """The experts of a problem.

    matrices: labels of the parameters, and of views and casts of them.
    shapes: shapes of the parameters.
    factors: label of each operator that reads them -> the factor that counts the experts.
    """

    def __init__(self, problem: Problem):
        self.matrices: set[str] = set()
        self.shapes: set[tuple[int, ...]] = set()
        self.factors: dict[str, str] = {}
        edges: dict[str, list[Edge]] = defaultdict(list)
        for edge in problem.edges:
            if edge.operand >= 0:
                edges[edge.tensor[0]].append(edge)
        for label, o in problem.operators.items():
            if o.kind == "param" and len(o.outputs[0].shape) == 3:
                views, factors = _views(label, problem, edges), {}
                for edge in (edge for view in views for edge in edges[view]):
                    reader = problem.operators[edge.reader]
                    if reader.target is aten.bmm.default or edge.operand in FUSED.get(reader.target, ()):
                        factors[edge.reader] = reader.rule.inputs[edge.operand][0][0]
                if factors:
                    self.matrices |= views
                    self.shapes.add(o.outputs[0].shape)
                    self.factors |= factors

    def updates(self, o: Operator) -> bool:
        """Whether an operator belongs to the update of experts, judged by the shapes of its operands and outputs."""
        return o.phase == UPDATE and any(spec.shape in self.shapes for spec in (*o.operands, *o.outputs))


def travels(operators: Mapping[str, Choices]) -> bool:
    """Whether tokens travel to their experts: an axis splits both."""
    return any(choice.also for choices in operators.values() for choice in choices.values())


def node_size(problem: Problem, operators: Mapping[str, Choices], mesh: Mesh, cluster: Cluster) -> int:
    """`Plan.node_size`: devices of a node, if tokens reach their experts sooner by nodes than directly, else 0."""
    node = cluster.levels[0][0]
    for label, o in problem.operators.items():
        axes = [axis for axis, choice in operators.get(label, {}).items() if choice.also]
        if o.target is not ops.experts.default or len(axes) != 1 or not (inside := inside_node(axes[0], mesh, node)):
            continue
        (size, stride), (experts, choices) = extent(axes[0], mesh), (o.operands[3].shape[0], o.operands[1].shape[1])

        def seconds(parts: int, ranks: int, stride: int, choices: int = choices, experts: int = experts,
                    routing: tuple[int, int] | None = o.node.meta.get("routing")) -> float:  # fmt: skip
            rows = expected_rows(MANY, choices, experts // parts, parts, routing)
            return cluster.time("exchange", rows * (ranks - 1) / ranks, stride, ranks)

        by_nodes = seconds(size // inside, size // inside, inside * stride) + seconds(size, inside, stride)
        return node if by_nodes < seconds(size, size, stride) else 0
    return 0


def _views(label: str, problem: Problem, edges: dict[str, list[Edge]]) -> set[str]:
    """The labels of a parameter and of its views and casts."""
    labels, todo = {label}, [label]
    while todo:
        new = {edge.reader for edge in edges[todo.pop()]} & problem.weights - labels
        labels |= new
        todo += new
    return labels
