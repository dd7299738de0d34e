"""Append local operators to a graph, each with the spec of its result."""

from __future__ import annotations

import torch
from torch import fx

from tutti.ir.spec import Spec

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

    def slice(self, x: fx.Node, dim: int, begin: int, end: int) -> fx.Node:
        shape = x.meta["val"].shape
        return self(aten.slice.Tensor, (x, dim, begin, end), (*shape[:dim], end - begin, *shape[dim + 1 :]))

    def first(self, x: fx.Node, dim: int, size: int) -> fx.Node:
        return self.slice(x, dim, 0, size)

    def padded(self, x: fx.Node, dim: int, size: int) -> fx.Node:
        """x with zeros at the end of a dim, so that it has this size."""
        shape = x.meta["val"].shape
        pads = [0, 0] * (len(shape) - dim - 1) + [0, size - shape[dim]]
        return self(aten.constant_pad_nd.default, (x, pads), (*shape[:dim], size, *shape[dim + 1 :]))

    def permute(self, x: fx.Node, order: list[int]) -> fx.Node:
        if order == sorted(order):
            return x
        return self(aten.permute.default, (x, order), tuple(x.meta["val"].shape[i] for i in order))
