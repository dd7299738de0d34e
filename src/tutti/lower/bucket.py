"""Buckets: neighbouring collectives of one kind, axis and dtype become one, so that latency is paid once."""

from __future__ import annotations

from itertools import accumulate
from math import prod

import torch
from torch import fx

from tutti.graph.step_graph import Call, Spec
from tutti.lower.collectives import all_gather, all_reduce, reduce_scatter
from tutti.lower.emit import Emitter
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
    """One collective in the place of the last of the group, on all operands end to end."""
    first: Spec = group[0].args[0].meta["val"]
    target, (_, *rest) = group[0].target, group[0].args
    rows = () if target in (all_reduce, all_gather) else first.shape[:1]  # the operand's leading dim goes over the axis
    lead = () if target in (all_reduce, reduce_scatter) else group[0].meta["val"].shape[:1]  # so does the result's
    widths = [n.args[0].meta["val"].numel // prod(rows) for n in group]
    emit = Emitter(graph, {**group[0].meta, "val": first})
    with graph.inserting_before(group[-1].next):
        flat = [emit.reshape(n.args[0], (*rows, width)) for n, width in zip(group, widths, strict=True)]
        joined = emit(aten.cat.default, (flat, len(rows)), (*rows, sum(widths)))
        result = emit(target, (joined, *rest), (*lead, sum(widths)))
        for node, end, width in zip(group, accumulate(widths), widths, strict=True):
            part = emit(aten.slice.Tensor, (result, len(lead), end - width, end), (*lead, width))
            node.replace_all_uses_with(emit.reshape(part, node.meta["val"].shape))
    for node in group:
        graph.erase_node(node)
