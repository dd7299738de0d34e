"""Matrix products of layers in low precision: a step whose products with weights inside layers are `tutti.scaled_mm`.

All three products of a weight are: the forward pass, the gradient of the input and that of the weight. So are those of
fused experts. Products outside numbered layers (embeddings, the last layer), routers (with a result of less than an
eighth of the contracted dim) and attention keep their dtype. Sizes must be multiples of 16, as kernels require.

Operands are rounded by operators of their own (`lower.variants.roundings`), so that products share them.
"""

from __future__ import annotations

import torch
from torch import fx

from tutti.ir.labels import annotate_labels, is_layer, layer_of
from tutti.ir.step_graph import FORWARD, UPDATE, Call, StepGraph, copy_graph
from tutti.lower.variants.roundings import rounded
from tutti.ops.costs import annotate_costs
from tutti.ops.products.scaled_mm import SCALED_MM

aten = torch.ops.aten
ROUTES = 8  # a product with so many times fewer results than operands in a row belongs to a router
MATMUL_AT = {torch.ops.tutti.experts.default: 10, torch.ops.tutti.experts_backward.default: 11}  # argument `matmul`
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def in_low_precision(step: StepGraph, name: str) -> StepGraph:
    """Convert the products of a step to a format of `nn.linear.scaled_mm`. Raises ValueError if none can be
    converted."""
    graph, mapping = copy_graph(step.graph)
    products, experts = _products(graph), _experts(graph)
    if not (products or experts):
        raise ValueError(f"no matrix product of a numbered layer can be in {name}: sizes must be multiples of 16")
    for node in experts:
        at = MATMUL_AT[node.target]
        node.args = (*node.args[:at], name, *node.args[at + 1 :])
    operands = rounded(graph, products, name)
    for node in products:
        *added, _, _ = node.args
        args = (*operands[node], name, node.meta["val"].dtype)
        if not added:
            node.target, node.args = SCALED_MM, args
            continue
        with graph.inserting_before(node):
            product = graph.call_function(SCALED_MM, args)
        product.meta = dict(node.meta)
        node.target, node.args = aten.add.Tensor, (product, added[0])
    outputs = {name: mapping[node] for name, node in step.outputs.items()}
    inputs = {name: mapping[node] for name, node in step.inputs.items()}
    graph.output(tuple(outputs.values())).meta = {"path": "", "phase": "", "val": None}
    graph.eliminate_dead_code(lambda node: node.op != "call_function")  # transposed views
    converted = StepGraph(graph, inputs, outputs, step.constants, step.device)
    annotate_labels(converted)
    annotate_costs(converted)
    return converted


def _experts(graph: fx.Graph) -> list[Call]:
    calls = [n for n in graph.nodes if n.target in MATMUL_AT]
    return [n for n in calls if all(size % 16 == 0 for size in n.args[MATMUL_AT[n.target] - 6].meta["val"].shape[1:])]


def _products(graph: fx.Graph) -> list[Call]:
    calls = [n for n in graph.nodes if n.target in (aten.mm.default, aten.addmm.default) and not n.kwargs]
    calls = [n for n in calls if n.meta["phase"] != UPDATE and is_layer(layer_of(n.meta["path"]))]
    routers = {n.meta["path"] for n in calls if n.meta["phase"] == FORWARD and ROUTES * _sizes(n)[2] < _sizes(n)[1]}
    return [n for n in calls if n.meta["path"] not in routers and n.meta["val"].dtype in DTYPES and _aligned(n)]


def _sizes(node: Call) -> tuple[int, int, int]:
    a, b = (x.meta["val"].shape for x in node.args[-2:])  # pyright: ignore
    return a[0], a[1], b[1]


def _aligned(node: Call) -> bool:
    return all(size % 16 == 0 for size in _sizes(node))
