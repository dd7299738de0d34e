"""Roundings of the operands of products in low precision: one for all products that use a tensor alike.

A left operand is rounded along its rows, a right one along its columns, and a transposed view along the other dim of
its tensor. Where a rank rounds a tensor along both dims, it reads it once (`lower.variants.round_once`).

    weight      along one dim in the forward pass, along the other in the backward pass
    gradient    along both: for the gradient of the input, and for that of the weight
    input       along its rows for the forward pass, along its columns for the gradient of the weight

The forward pass rounds an input along both dims. The backward pass then keeps its columns in the format instead of the
input itself, which has more bytes. If the backward pass reads the input for other reasons (the result of attention, the
operand of a router), the input is kept anyway, and the backward pass rounds its columns.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from tutti.ir.costs import FREE
from tutti.ir.spec import Spec
from tutti.ir.step_graph import BACKWARD, FORWARD, Call
from tutti.nn.linear.scaled_mm import format_of
from tutti.ops.products.scaled_mm import ROUND_OPERAND
from tutti.plan.search.recompute import made_by

aten = torch.ops.aten
Key = tuple[fx.Node, int, str]  # a matrix, the dim along which it is rounded, and the phase


def rounded(graph: fx.Graph, products: Sequence[Call], name: str) -> dict[Call, tuple[fx.Node, ...]]:
    """Round the operands of these products, each before its first reader. Returns numbers and scales of both operands
    of each product."""
    reads = {node: [_untransposed(x, 1 - at) for at, x in enumerate(node.args[-2:])] for node in products}
    in_backward = {read for node in products for read in reads[node] if node.meta["phase"] == BACKWARD}
    needed = _read_otherwise(graph, set(products))
    roundings: dict[Key, tuple[fx.Node, fx.Node]] = {}

    def make(x: fx.Node, dim: int, reader: Call) -> None:
        phase = reader.meta["phase"]
        if not roundings.keys() & {(x, dim, FORWARD), (x, dim, phase)}:
            with graph.inserting_before(reader):
                roundings[x, dim, phase] = _round(graph, x, dim, name, reader.meta)

    for node in products:
        for x, dim in reads[node]:
            make(x, dim, node)
            if (
                node.meta["phase"] == FORWARD
                and (x, 1 - dim) in in_backward
                and _is_computed(x)
                and made_by(x) not in needed
            ):
                make(x, 1 - dim, node)
    return {
        node: tuple(
            part for x, dim in reads[node]
            for part in (roundings[x, dim, FORWARD if (x, dim, FORWARD) in roundings else node.meta["phase"]])
        )
        for node in products
    }  # fmt: skip


def _round(graph: fx.Graph, x: fx.Node, dim: int, name: str, meta: dict) -> tuple[fx.Node, fx.Node]:
    """Append a rounding. Returns numbers and scales."""
    rows, k = x.meta["val"].shape[1 - dim], x.meta["val"].shape[dim]
    form = format_of(name)
    specs = Spec((rows, form.width(k)), torch.uint8), Spec((rows, form.blocks(k)), form.scales)
    node = graph.call_function(ROUND_OPERAND, (x, dim, name))
    node.meta = {**meta, "val": specs}
    numbers, scales = (graph.call_function(operator.getitem, (node, i)) for i in range(2))
    numbers.meta, scales.meta = ({**meta, "val": spec} for spec in specs)
    return numbers, scales


def _untransposed(x: fx.Node, dim: int) -> tuple[fx.Node, int]:
    """The matrix of which x is a transposed view, and its dim that is `dim` of x."""
    while x.target is aten.t.default or (x.target in (aten.transpose.int, aten.permute.default) and _is_swap(x)):
        x, dim = x.all_input_nodes[0], 1 - dim
    return x, dim


def _is_swap(x: Call) -> bool:
    """Return whether a transposition or permutation swaps the dims of a matrix."""
    shape, dims = x.meta["val"].shape, x.args[1:] if x.target is aten.transpose.int else x.args[1]
    return len(shape) == 2 and dims[0] % 2 != dims[1] % 2 and (x.target is aten.transpose.int or dims[0] % 2 == 1)


def _is_computed(x: fx.Node) -> bool:
    """Return whether the forward pass allocates the memory of a matrix."""
    maker, _ = made_by(x)
    return maker.op == "call_function" and maker.meta["phase"] == FORWARD


def _read_otherwise(graph: fx.Graph, products: set[Call]) -> set[tuple[fx.Node, int]]:
    """Return the values that the backward pass reads, except in these products."""
    readers = (n for n in graph.nodes if n.op == "call_function" and n.meta["phase"] != FORWARD)
    return {made_by(x) for n in readers if n.target not in FREE and n not in products for x in n.all_input_nodes}
