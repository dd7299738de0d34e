"""Buckets: merge collectives of one kind, axis and dtype with the same dependencies into one, to pay latency once.

Gradients are reduced layer by layer, as soon as they fill a bucket. If they are scattered, at most one bucket of them
is unsharded at a time; if no update couples them, they are then consumed and freed (`lower.memory.inplace`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from math import prod

import torch
from torch import fx

from tutti.ir.costs import FREE
from tutti.ir.coupling import coupled
from tutti.ir.labels import layer_of
from tutti.ir.spec import Spec
from tutti.ir.step_graph import BACKWARD, Call
from tutti.lower.collectives import all_gather, all_reduce, reduce_scatter
from tutti.lower.emit import Emitter
from tutti.lower.memory.inplace import written
from tutti.lower.overlap.order import advance, chain, collectives_together, sort
from tutti.plan.layouts.price import BUCKET

aten = torch.ops.aten
SUMMING = (aten.add_.Tensor, written)  # what adds a gradient to its sum (`lower.parts.gradient_sums`)


def bucket(graph: fx.Graph) -> None:
    """Merge collectives of the update and of gradients, in place, into buckets of at most BUCKET bytes."""
    waits = collectives_together(graph)
    together = coupled(graph)
    groups: dict[tuple, list[Call]] = {}  # collectives that depend on others come after these
    node: Call
    for node, depth in [*sorted(waits.items(), key=lambda item: item[1]), *_handed_out(graph).items()]:
        operand: Spec = node.args[0].meta["val"]
        groups.setdefault((node in waits, depth, node.target, *node.args[1:], operand.dtype), []).append(node)
    for (in_update, depth, target, *_), nodes in groups.items():
        early = not in_update or target is reduce_scatter or not (together or depth[0] or _of_inputs(nodes))
        layers = _in_layers(advance(graph, nodes)) if early else [[n] for n in nodes]
        for piece in _pieces(layers):
            if len(piece) > 1:
                _merge(graph, piece)
    sort(graph)  # readers of a bucket's first collective stood before its last


def _of_inputs(nodes: Sequence[Call]) -> bool:
    """Return whether some of the operands depend on inputs only."""
    return any(root.op == "placeholder" for node in nodes for root in chain(node)[0])


def _handed_out(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return the collectives of gradients that only the output or a sum reads, each with the length of the chain of
    such collectives that it depends on."""
    only: set[fx.Node] = set()
    collectives: list[fx.Node] = []
    for node in reversed(graph.nodes):
        if all(user.op == "output" or user in only for user in node.users) and node.op == "call_function":
            if node.target in (all_reduce, reduce_scatter) and node.meta["phase"] == BACKWARD:
                collectives.insert(0, node)
                only.add(node)
            elif node.target in FREE or node.target in SUMMING:
                only.add(node)
    depth: dict[fx.Node, int] = {}
    for node in collectives:
        depth[node] = max((depth[x] + 1 for x in chain(node)[0] if x in depth), default=0)
    return depth


def _in_layers(pairs: Sequence[tuple[Call, fx.Node]]) -> list[list[Call]]:
    """Group collectives by layer. pairs: a collective, and the call that computes its operand."""
    layers = groupby(pairs, lambda pair: layer_of(pair[1].meta.get("path", "")))
    return [[node for node, _ in layer] for _, layer in layers]


def _pieces(layers: Sequence[list[Call]]) -> Iterator[list[Call]]:
    """Buckets of as many full layers as fit, so that equal layers are bucketed equally. Larger layers are divided."""
    piece: list[Call] = []
    for layer in layers:
        if piece and _bytes(piece) + _bytes(layer) > BUCKET:
            yield piece
            piece = []
        for node in layer:
            if piece and _bytes(piece) + _bytes([node]) > BUCKET:
                yield piece
                piece = []
            piece.append(node)
    yield piece


def _bytes(nodes: Sequence[Call]) -> int:
    return sum(node.args[0].meta["val"].bytes for node in nodes)


def _merge(graph: fx.Graph, group: list[Call]) -> None:
    """One collective on all concatenated operands, in place of the last of the group."""
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
