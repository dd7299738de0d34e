"""Matrix products of layers in FP8: a step whose products with weights inside layers are `tutti.fp8_mm`.

All three products of a weight are: the forward pass, the gradient of the input and that of the weight. Products outside
numbered layers (embeddings, the last layer), routers (with a result of less than an eighth of the contracted dim),
attention and fused experts keep their dtype. Sizes must be multiples of 16, as kernels require.
"""

from __future__ import annotations

import torch
from torch import fx

from tutti.ir.labels import annotate_labels, is_layer, layer_of
from tutti.ir.step_graph import FORWARD, UPDATE, Call, StepGraph, copy_graph
from tutti.ops.costs import annotate_costs
from tutti.ops.fp8 import FP8_MM

aten = torch.ops.aten
ROUTES = 8  # a product with so many times fewer results than operands in a row belongs to a router
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def in_fp8(step: StepGraph) -> StepGraph:
    """The step with FP8 products. Raises ValueError if it has none that could be."""
    graph, mapping = copy_graph(step.graph)
    found = _products(graph)
    if not found:
        raise ValueError("no matrix product of a numbered layer can be in FP8: sizes must be multiples of 16")
    for node in found:
        *added, a, b = node.args
        if not added:
            node.target = FP8_MM
            continue
        with graph.inserting_before(node):
            product = graph.call_function(FP8_MM, (a, b))
        product.meta = dict(node.meta)
        node.target, node.args = aten.add.Tensor, (product, added[0])
    outputs = {name: mapping[node] for name, node in step.outputs.items()}
    graph.output(tuple(outputs.values())).meta = {"path": "", "phase": "", "val": None}
    inputs = {name: mapping[node] for name, node in step.inputs.items()}
    made = StepGraph(graph, inputs, outputs, step.constants, step.device)
    annotate_labels(made)
    annotate_costs(made)
    return made


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
