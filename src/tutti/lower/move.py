"""Append the steps of a reshard to a graph, as local operators around a collective."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import torch
from torch import fx

from tutti.lower.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from tutti.lower.emit import Emitter, Shape
from tutti.plan.layout import Mesh, Partial, Split
from tutti.plan.reshard import Step

aten = torch.ops.aten


def move(graph: fx.Graph, node: fx.Node, step: Step, shape: Shape, mesh: Mesh, where: Mapping[str, int]) -> fx.Node:
    """Append the reshard of this rank's part of a tensor of global `shape` from step.source to step.target."""
    emit = Emitter(graph, node.meta)
    k, old, new = mesh[step.axis], step.source[step.axis], step.target[step.axis]
    x = node
    if step.kind == "mask":
        first, spec = where[step.axis] == 0, x.meta["val"]
        if spec.dtype.is_floating_point:  # code that differs between ranks only in numbers is compiled once
            return emit(aten.clamp.default, (x, -inf, inf) if first else (x, 0.0, 0.0), spec.shape)
        return emit(aten.alias.default if first else aten.zeros_like.default, (x,), spec.shape)
    if step.kind == "all_reduce":
        assert isinstance(old, Partial)
        return emit(all_reduce, (x, step.axis, old.op), x.meta["val"].shape)
    if isinstance(new, Split):  # reshape the dim so that the axis has a separate one
        before = step.source.before(new.dim, shape[new.dim], mesh, new.outer)
        if step.kind == "slice":
            return take(emit, x, new.dim, before, k, where[step.axis])
        x = _to_front(emit, x, new.dim, before, k)
    if step.kind == "reduce_scatter":
        assert isinstance(old, Partial)
        return emit(reduce_scatter, (x, step.axis, old.op), x.meta["val"].shape[1:])
    if step.kind == "all_to_all":
        x = emit(all_to_all, (x, step.axis), x.meta["val"].shape)
    else:
        x = emit(all_gather, (x, step.axis, k), (k, *x.meta["val"].shape))
    assert isinstance(old, Split)  # merge the gathered dim into the dim that was split
    return _from_front(emit, x, old.dim, step.target.before(old.dim, shape[old.dim], mesh, old.outer))


def _parted(shape: Shape, dim: int, before: int, k: int) -> Shape:
    return (*shape[:dim], before, k, shape[dim] // (before * k), *shape[dim + 1 :])


def take(emit: Emitter, x: fx.Node, dim: int, before: int, k: int, index: int) -> fx.Node:
    shape = x.meta["val"].shape
    if before == 1:  # one block: a view
        size = shape[dim] // k
        local = (*shape[:dim], size, *shape[dim + 1 :])
        return emit(aten.slice.Tensor, (x, dim, index * size, (index + 1) * size), local)
    x = emit.reshape(x, _parted(shape, dim, before, k))
    parted = x.meta["val"].shape
    x = emit(aten.select.int, (x, dim + 1, index), parted[: dim + 1] + parted[dim + 2 :])
    return emit.reshape(x, (*shape[:dim], shape[dim] // k, *shape[dim + 1 :]))


def _to_front(emit: Emitter, x: fx.Node, dim: int, before: int, k: int) -> fx.Node:
    """(..., before k after, ...) -> (k, ..., before after, ...)"""
    shape = x.meta["val"].shape
    x = emit.reshape(x, _parted(shape, dim, before, k))
    rank = len(x.meta["val"].shape)
    x = emit.permute(x, [dim + 1, *range(dim + 1), *range(dim + 2, rank)])
    return emit.reshape(x, (k, *shape[:dim], shape[dim] // k, *shape[dim + 1 :]))


def _from_front(emit: Emitter, x: fx.Node, dim: int, before: int) -> fx.Node:
    """(k, ..., before after, ...) -> (..., before k after, ...)"""
    k, *shape = x.meta["val"].shape
    x = emit.reshape(x, (k, *shape[:dim], before, shape[dim] // before, *shape[dim + 1 :]))
    rank = len(x.meta["val"].shape)
    x = emit.permute(x, [*range(1, dim + 2), 0, *range(dim + 2, rank)])
    return emit.reshape(x, (*shape[:dim], shape[dim] * k, *shape[dim + 1 :]))
