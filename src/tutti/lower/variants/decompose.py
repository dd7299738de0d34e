"""Decompose operators of this project into plain ATen, so that a compiler can fuse them with their neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from tutti.ir.spec import Spec
from tutti.ir.step_graph import Call
from tutti.nn import random
from tutti.nn.fused import FUSED
from tutti.tracing.trace.inline import paste, template

ops = torch.ops.tutti


def write_out(graph: fx.Graph) -> None:
    """Replace fused operators and random numbers by their formulas, in place.

    The keys of random numbers are computed first, so that layers that differ only in them are equal.
    """
    formulas: dict[str, fx.Graph] = {}  # by formula and specs of operands
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    node: Call
    for node in list(graph.nodes):
        if node.target is ops.uniform.default:
            seed, step, salt, *shape = node.args
            with graph.inserting_after(inputs[-1]):
                keys = graph.call_function(ops.keys.default, (seed, step, salt), dict(node.kwargs))
            keys.meta = {**node.meta, "val": Spec((2,), torch.int64)}
            device = node.kwargs["device"]
            _replace(node, random.uniform_of, (keys, *shape, device), {}, device, formulas)
        elif node.target in FUSED:
            _replace(node, FUSED[node.target], node.args, node.kwargs, "cpu", formulas)


def _replace(node: Call, formula: Callable, args: tuple, kwargs: dict[str, Any], device: torch.device | str,
             formulas: dict[str, fx.Graph]) -> None:  # fmt: skip
    graph, before = node.graph, node.prev
    how = repr((formula, fx.map_arg((args, kwargs), lambda n: n.meta["val"])))
    if how not in formulas:
        formulas[how] = template(formula, args, kwargs, device)
    with graph.inserting_before(node):
        result: Any = paste(graph, formulas[how], args, kwargs)
    inserted: list[fx.Node] = []  # in reverse order
    while (last := inserted[-1].prev if inserted else node.prev) is not before:
        last.meta = {**node.meta, **last.meta}
        inserted.append(last)
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    else:
        part: Call
        for part in list(node.users):  # getitem
            part.replace_all_uses_with(result[part.args[1]])
            graph.erase_node(part)
    graph.erase_node(node)
    for unread in inserted:
        if not unread.users:
            graph.erase_node(unread)
