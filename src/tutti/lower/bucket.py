"""Buckets: neighbouring collectives of one kind, axis and dtype become one, so that latency is paid once."""

from __future__ import annotations

from math import prod

import torch
from torch import fx

from tutti.graph.step_graph import Call, Spec
from tutti.lower.collectives import all_gather, all_reduce, reduce_scatter
from tutti.lower.order import collectives_together
from tutti.plan.price import BUCKET

aten = torch.ops.aten


def bucket(graph: fx.Graph) -> None:
    """Merge the update's collectives that wait for the same, in place, in pieces of at most BUCKET bytes."""
    waits = collectives_together(graph)
    groups: dict[tuple, list[list[Call]]] = {}
    node: Call
    for node, depth in waits.items():
        operand: Spec = node.args[0].meta["val"]
        pieces = groups.setdefault((depth, node.target, *node.args[1:], operand.dtype), [[]])
        if pieces[-1] and sum(n.args[0].meta["val"].bytes for n in pieces[-1]) + operand.bytes > BUCKET:
            pieces.append([])
        pieces[-1].append(node)
    for piece in (piece for pieces in groups.values() for piece in pieces):
        if len(piece) > 1:
            _merge(graph, piece)


def _merge(graph: fx.Graph, group: list[Call]) -> None:
    first, last = group[0], group[-1]
    target, (_, *rest) = first.target, first.args
    has_rows = target not in (all_reduce, all_gather)  # the operand's leading dim goes over the axis
    origin = {key: first.meta[key] for key in ("phase", "path", "label") if key in first.meta}

    def emit(function, args: tuple, shape) -> fx.Node:
        node = graph.call_function(function, args)
        node.meta = {**origin, "val": Spec(tuple(shape), first.args[0].meta["val"].dtype)}
        return node

    with graph.inserting_after(last):
        graph_end = graph.call_function(aten.zeros.default, ([],))  # a mark to insert before
    with graph.inserting_before(graph_end):
        flat, widths = [], []
        for node in group:
            x, spec = node.args[0], node.args[0].meta["val"]
            rows = [spec.shape[0]] if has_rows else []
            widths.append(spec.numel // prod(rows))
            shape = [*rows, widths[-1]]
            flat.append(x if list(spec.shape) == shape else emit(aten.reshape.default, (x, shape), shape))
        total = sum(widths)
        rows = [group[0].args[0].meta["val"].shape[0]] if has_rows else []
        joined = emit(aten.cat.default, (flat, len(rows)), [*rows, total])
        made = group[0].meta["val"].shape
        lead = [] if target in (all_reduce, reduce_scatter) else [made[0]]
        result = emit(target, (joined, *rest), [*lead, total])
        start = 0
        for node, width in zip(group, widths, strict=True):
            part = emit(aten.slice.Tensor, (result, len(lead), start, start + width), [*lead, width])
            part = emit(aten.reshape.default, (part, list(node.meta["val"].shape)), node.meta["val"].shape)
            node.replace_all_uses_with(part)
            start += width
    for node in [*group, graph_end]:
        graph.erase_node(node)
