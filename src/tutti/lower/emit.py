"""Append local operators to a graph, each with the spec of its result."""

from __future__ import annotations

import torch
from torch import fx

from tutti.ir.step_graph import Spec

aten = torch.ops.aten
Shape = tuple[int, ...]
ORIGIN = (
    "phase",
    "path",
    "label",
    "copy",
    "recompute",
    "checkpoint",
)  # in the meta of a call, and of what stands for it


class Emitter:
    """Appends calls to a graph, with the spec of the result and the origin of what a collective moves."""

    def __init__(self, graph: fx.Graph, meta: dict):
        self.graph, self.dtype = graph, meta["val"].dtype
        self.origin = {key: meta[key] for key in ORIGIN if key in meta}

    def __call__(self, target, args: tuple, shape: Shape) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta = {**self.origin, "val": Spec(tuple(shape), self.dtype)}
        return node

    def reshape(self, x: fx.Node, shape: Shape) -> fx.Node:
        return x if x.meta["val"].shape == shape else self(aten.reshape.default, (x, list(shape)), shape)

    def permute(self, x: fx.Node, order: list[int]) -> fx.Node:
        if order == sorted(order):
            return x
        return self(aten.permute.default, (x, order), tuple(x.meta["val"].shape[i] for i in order))
