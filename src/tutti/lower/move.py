"""Append the steps of a reshard to a graph, as local operators around a collective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf, prod

import torch
from torch import fx

from tutti.lower.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from tutti.lower.emit import Emitter, Shape
from tutti.plan.layouts.layout import Mesh, Partial, Split, share
from tutti.plan.layouts.reshard import ReshardStep

aten = torch.ops.aten


def move(
    graph: fx.Graph, node: fx.Node, step: ReshardStep, shape: Shape, mesh: Mesh, where: Mapping[str, int]
) -> fx.Node:
    """Append the reshard of this rank's part of a tensor of global `shape` from step.source to step.target."""
    emit = Emitter(graph, node.meta)
    k, old, new = mesh[step.axis], step.source[step.axis], step.target[step.axis]
    x, index = node, where[step.axis]
    if step.kind == "mask":
        first, spec = index == 0, x.meta["val"]
        if spec.dtype.is_floating_point:  # code that differs between ranks only in numbers is compiled once
            return emit(aten.clamp.default, (x, -inf, inf) if first else (x, 0.0, 0.0), spec.shape)
        return emit(aten.alias.default if first else aten.zeros_like.default, (x,), spec.shape)
    if step.kind == "all_reduce":
        assert isinstance(old, Partial)
        return emit(all_reduce, (x, step.axis, old.op), x.meta["val"].shape)
    before = n = 1
    if isinstance(new, Split):  # reshape the dim so that the axis has a separate one
        before, n = step.target.cut(step.axis, step.source, shape[new.dim], mesh, where)
        if step.kind == "slice":
            return take(emit, x, new.dim, before, n, *share(n, k, index))
        x = _to_front(emit, x, new.dim, before, n, k, bool(new.unit))
    if isinstance(old, Split):
        outside, blocks = step.source.cut(step.axis, step.target, shape[old.dim], mesh, where)
        if old.unit:  # all ranks send equally many blocks
            own, most = share(blocks, k, index)[1], -(-blocks // k)
            x = _inside(emit.padded, emit, x, old.dim + (step.kind == "all_to_all"), outside, own, most)
    if step.kind == "reduce_scatter":
        assert isinstance(old, Partial)
        x = emit(reduce_scatter, (x, step.axis, old.op), x.meta["val"].shape[1:])
    elif step.kind == "all_to_all":
        x = emit(all_to_all, (x, step.axis), x.meta["val"].shape)
    else:
        x = emit(all_gather, (x, step.axis, k), (k, *x.meta["val"].shape))
    if isinstance(new, Split) and new.unit:
        own, most = share(n, k, index)[1], -(-n // k)
        x = _inside(emit.first, emit, x, new.dim + (step.kind == "all_to_all"), before, most, own)
    if isinstance(old, Split):  # merge the gathered dim into the dim that was split
        x = _from_front(emit, x, old.dim, outside, blocks, bool(old.unit))
    return x


def _parted(shape: Shape, dim: int, before: int, n: int) -> Shape:
    return (*shape[:dim], before, n, shape[dim] // (before * n), *shape[dim + 1 :])


def take(emit: Emitter, x: fx.Node, dim: int, before: int, n: int, first: int, count: int = 1) -> fx.Node:
    """Take blocks `first` to `first + count` of each `n` of a dim that is (before, n, rest)."""
    shape = x.meta["val"].shape
    size = shape[dim] // n * count
    local = (*shape[:dim], size, *shape[dim + 1 :])
    if before == 1:  # a view
        block = shape[dim] // n
        return emit(aten.slice.Tensor, (x, dim, first * block, (first + count) * block), local)
    x = emit.reshape(x, _parted(shape, dim, before, n))
    parted = x.meta["val"].shape
    if count == 1:
        x = emit(aten.select.int, (x, dim + 1, first), parted[: dim + 1] + parted[dim + 2 :])
    else:
        x = emit.slice(x, dim + 1, first, first + count)
    return emit.reshape(x, local)


def _inside(resize: Callable, emit: Emitter, x: fx.Node, dim: int, before: int, n: int, count: int) -> fx.Node:
    """Resize a dim (before, n, rest) to (before, count, rest): padded with zeros, or without the last blocks.

    All ranks have the same operators, whatever the sizes of their parts, so that they order collectives equally.
    """
    x = emit.reshape(x, _parted(x.meta["val"].shape, dim, before, n))
    x = resize(x, dim + 1, count)
    shape = x.meta["val"].shape
    return emit.reshape(x, (*shape[:dim], prod(shape[dim : dim + 3]), *shape[dim + 3 :]))


def _to_front(emit: Emitter, x: fx.Node, dim: int, before: int, n: int, k: int, uneven: bool) -> fx.Node:
    """(..., before n rest, ...) -> (k, ..., before most rest, ...), where a part has at most `most` of n."""
    shape = x.meta["val"].shape
    x = emit.reshape(x, _parted(shape, dim, before, n))
    rank = len(x.meta["val"].shape)
    x = emit.permute(x, [dim + 1, *range(dim + 1), *range(dim + 2, rank)])
    most = -(-n // k)
    if uneven:  # the first parts have `most` blocks, the others one less
        rest, full = x.meta["val"].shape[1:], n - k * (most - 1)
        large = emit.reshape(emit.slice(x, 0, 0, full * most), (full, most, *rest))
        small = emit.reshape(emit.slice(x, 0, full * most, n), (k - full, most - 1, *rest))
        x = emit(aten.cat.default, ([large, emit.padded(small, 1, most)],), (k, most, *rest))
        x = emit.permute(x, [0, *range(2, dim + 3), 1, *range(dim + 3, rank + 1)])
    return emit.reshape(x, (k, *shape[:dim], shape[dim] // n * most, *shape[dim + 1 :]))


def _from_front(emit: Emitter, x: fx.Node, dim: int, before: int, n: int, uneven: bool) -> fx.Node:
    """(k, ..., before most rest, ...) -> (..., before n rest, ...). The inverse of `_to_front`."""
    k, *shape = x.meta["val"].shape
    most = -(-n // k)
    x = emit.reshape(x, (k, *_parted(tuple(shape), dim, before, most)))
    rank = len(x.meta["val"].shape)
    x = emit.permute(x, [0, dim + 2, *range(1, dim + 2), *range(dim + 3, rank)])
    rest, full = x.meta["val"].shape[2:], n - k * (most - 1)
    if uneven:
        large = emit.reshape(emit.slice(x, 0, 0, full), (full * most, *rest))
        small = emit.slice(emit.slice(x, 0, full, k), 1, 0, most - 1)
        small = emit.reshape(small, ((k - full) * (most - 1), *rest))
        x = emit(aten.cat.default, ([large, small],), (n, *rest))
    else:
        x = emit.reshape(x, (n, *rest))
    x = emit.permute(x, [*range(1, dim + 2), 0, *range(dim + 2, rank - 1)])
    return emit.reshape(x, (*shape[:dim], shape[dim] // most * n, *shape[dim + 1 :]))
