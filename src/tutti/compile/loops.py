"""Loops for Inductor: rewritten to torch's higher-order operators, so that a loop becomes one C++ function."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import count

import torch
from torch import fx

import tutti.nn.quantized.stored  # noqa: F401  (registers the operator)
from tutti.ir.loops import LOOPS, Body, Branch, Loop, While
from tutti.ir.values import base_of

aten, higher = torch.ops.aten, torch.ops.higher_order


def with_higher_order(graph: fx.Graph) -> tuple[fx.Graph, dict[str, fx.GraphModule]]:
    """A copy of the graph with torch's higher-order operators instead of loops, and their sub-graphs by name."""
    copy, modules, numbers = fx.Graph(), {}, count()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.target in LOOPS:
            operands = [mapping[x] for x in node.args[0]]
            results = _written(copy, LOOPS[node.target], operands, modules, numbers)
            for user in list(node.users):
                assert user.target is operator.getitem, "the outputs of a loop are read one by one"
                mapping[user] = results[user.args[1]]
        elif node not in mapping:
            mapping[node] = copy.node_copy(node, mapping.__getitem__)
    return copy, modules


def _written(graph: fx.Graph, loop: Loop, operands: list[fx.Node], modules: dict[str, fx.GraphModule],
             numbers: Iterator[int]) -> list[fx.Node]:  # fmt: skip
    """Append a loop to a graph. Returns its outputs."""

    def module(body: Body) -> fx.Node:
        name = f"body_{next(numbers)}"
        own, inner = with_higher_order(_without_aliases(body.step.graph))
        modules[name] = fx.GraphModule(inner, own)
        return graph.get_attr(name)

    def call(function, *args) -> fx.Node:
        return graph.call_function(function, args)

    def outputs(call_node: fx.Node) -> list[fx.Node]:
        return [call(operator.getitem, call_node, i) for i in range(len(loop.outputs))]

    bases = [x if x.target is operator.getitem else base_of(x) for x in operands]
    contiguous = [
        call(aten.clone.default if bases[i] in bases[:i] else aten.contiguous.default, x)
        for i, x in enumerate(operands)
    ]  # no two of them alias
    assert not isinstance(loop, Branch)
    carries, rest = contiguous[: loop.carries], contiguous[loop.carries :]
    if isinstance(loop, While):
        bodies = module(loop.condition), module(loop.body)
        return outputs(call(higher.while_loop, *bodies, tuple(carries), tuple(rest)))
    xs, rest = rest[: loop.scanned], rest[loop.scanned :]
    if loop.reverse:
        xs = [call(aten.flip.default, x, [0]) for x in xs]
    results = outputs(call(higher.scan, module(loop.body), carries, xs, rest))
    if loop.reverse:
        results = results[: loop.carries] + [call(aten.flip.default, y, [0]) for y in results[loop.carries :]]
    return results


def _without_aliases(graph: fx.Graph) -> fx.Graph:
    """A copy whose outputs are contiguous and do not alias, as torch's operators require."""
    copy = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    results = copy.graph_copy(graph, mapping)
    stored = torch.ops.tutti.stored.default  # equal outputs stay two tensors
    copy.output(tuple(copy.call_function(stored, (x, i)) for i, x in enumerate(results, 1)))  # pyright: ignore
    return copy
