"""Regions: compute what lies between a Program's collectives in parts, in place.

Each call in a region (`lower.overlap.computed_in_parts`) becomes one call per part, with its index in meta["copy"].
Values that others need whole are concatenated or added from the parts. `analysis.overlap` then finds an order in which
one part computes while another communicates. Unlike copies of the batch (`lower.variants.unroll`), regions can also
split the sequence, and they leave whole what would have to wait for all parts.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from tutti.ir.costs import FREE
from tutti.ir.op_info import ARGUMENTS
from tutti.ir.spec import Spec
from tutti.lower.collectives import ppermute
from tutti.lower.emit import Emitter
from tutti.lower.move import take
from tutti.lower.overlap.computed_in_parts import InParts, in_parts
from tutti.lower.program import Program
from tutti.lower.shard import arrangements
from tutti.ops import operands, source, specs
from tutti.plan.layouts.layout import Layout, Placement, Split

aten = torch.ops.aten
AXIS = "part"


def divide(program: Program) -> None:
    """Compute the regions of a Program in `overlap_chunks` parts, in place.

    A Program without regions is left alone, with overlap_chunks = 1. So is one with ppermutes, because ranks could find
    different regions.
    """
    graph, count = program.graph, program.overlap_chunks
    if count == 1:
        return
    split_calls = {} if any(n.target is ppermute for n in graph.nodes) else in_parts(graph, count)
    if not split_calls:
        program.overlap_chunks = 1
    divider = _Divider(graph, split_calls, count)
    for node in list(graph.nodes):
        if node in split_calls or source(node)[0] in split_calls:
            divider.write(node)
    divider.join()
    for node in reversed(list(divider.parts)):
        if not node.users:  # also collectives, which dead code elimination would keep
            graph.erase_node(node)
    graph.eliminate_dead_code()


def check_divided(program: Program, parts: int) -> None:
    """Raise ValueError if a Program that should be computed in several parts has no regions."""
    if parts > program.overlap_chunks:
        raise ValueError(
            f"regions cannot be computed in {parts} parts: on a mesh {dict(program.mesh)} there is no communication "
            f"between computations whose batch or sequence divides into {parts}; choose a number that divides them, "
            "a plan with 'tp', or one without 'regions'"
        )


class _Divider:
    """Writes the parts of calls.

    split_calls: the calls to compute in parts. parts: the parts of their values. cuts: the slices of whole values.
    """

    def __init__(self, graph: fx.Graph, split_calls: dict[fx.Node, InParts], count: int):
        self.graph, self.split_calls, self.count = graph, split_calls, count
        self.mesh = {AXIS: count}
        self.parts: dict[fx.Node, list[fx.Node]] = {}
        self.cuts: dict[tuple[fx.Node, Split, int], fx.Node] = {}

    def lies(self, x: fx.Node) -> Placement:
        maker, output = source(x)
        return self.split_calls[maker].outs[output]

    def write(self, node: fx.Node) -> None:
        """Insert the parts of a call in front of it."""
        with self.graph.inserting_before(node):
            self.parts[node] = [self.part(node, i) for i in range(self.count)]

    def part(self, node: fx.Node, i: int) -> fx.Node:
        if node.target is operator.getitem:
            maker, output = source(node)
            call = self.graph.call_function(operator.getitem, (self.parts[maker][i], output))
            call.meta = {**node.meta, "val": self.specs(maker)[output], "copy": i}
            return call
        how, local = self.split_calls[node], self.specs(node)
        local_operands = [
            self.read(node, number, x, at, i) if isinstance(at, Split) else x
            for number, (x, at) in enumerate(zip(operands(node), how.ins, strict=True))
        ]
        parts = iter(local_operands)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: next(parts))  # pyright: ignore
        if node.target in ARGUMENTS:
            args = ARGUMENTS[node.target](args, [spec.shape for spec in local])
        call = self.graph.create_node("call_function", node.target, args, kwargs)
        is_tuple = isinstance(node.meta["val"], tuple)
        val = tuple(spec if spec.dtype else None for spec in local) if is_tuple else local[0]
        call.meta = {**node.meta, "val": val, "copy": i}
        return call

    def specs(self, node: fx.Node) -> list[Spec]:
        """Return the specs of the outputs of one part."""
        return [
            Spec(self.layout(at).local_shape(spec.shape, self.mesh), spec.dtype)
            for spec, at in zip(specs(node), self.split_calls[node].outs, strict=True)
        ]

    def layout(self, at: Placement) -> Layout:
        return Layout.of({AXIS: at})

    def read(self, node: fx.Node, number: int, x: fx.Node, at: Split, i: int) -> fx.Node:
        """Part i of an operand."""
        if x in self.parts and self.lies(x) == at:
            return self.parts[x][i]
        if (x, at, i) not in self.cuts:
            emit = Emitter(self.graph, {**x.meta, "phase": node.meta["phase"], "copy": i})
            self.cuts[x, at, i] = take(emit, x, at.dim, at.outer, self.count, i)
        cut = self.cuts[x, at, i]
        for arrange in arrangements(node, number):
            arranged = self.graph.call_function(arrange, (cut,))
            arranged.meta = dict(cut.meta)
            cut = arranged
        return cut

    def join(self) -> None:
        """Join values that are needed whole. Views of them become views of the joined value."""
        for node, parts in self.parts.items():
            if source(node)[0].target in FREE or not isinstance(node.meta["val"], Spec):
                continue
            at, emit = self.lies(node), Emitter(self.graph, node.meta)
            with self.graph.inserting_before(node):
                whole = self.joined(emit, parts, at) if isinstance(at, Split) else self.added(emit, parts)
            node.replace_all_uses_with(whole)

    def joined(self, emit: Emitter, parts: list[fx.Node], at: Split) -> fx.Node:
        """(..., outer inner, ...) of each part as (..., outer parts inner, ...)"""
        before, (n, *after) = parts[0].meta["val"].shape[: at.dim], parts[0].meta["val"].shape[at.dim :]
        if at.outer == 1:
            return emit(aten.cat.default, (parts, at.dim), (*before, self.count * n, *after))
        rows = [emit.reshape(x, (*before, at.outer, 1, n // at.outer, *after)) for x in parts]
        shape = (*before, at.outer, self.count, n // at.outer, *after)
        return emit.reshape(emit(aten.cat.default, (rows, at.dim + 1), shape), (*before, self.count * n, *after))

    def added(self, emit: Emitter, parts: list[fx.Node]) -> fx.Node:
        total, *others = parts
        for x in others:
            total = emit(aten.add.Tensor, (total, x), x.meta["val"].shape)
        return total
