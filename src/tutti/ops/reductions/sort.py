"""Operators that compare entries along a dim: maximum, order, rank among others.

The maximum of a split dim is the maximum of the parts' maxima. torch does not define which of equal entries `topk`
finds, and the split may find another; `max` and `argmax` find the first in any case.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.ir.op_info import CONTIGUOUS, LOCAL, SENDS
from tutti.ir.step_graph import Call
from tutti.ops.registry import Cut, named, operands, rules
from tutti.ops.view import letters, names

aten = torch.ops.aten

EXTREMES = {
    aten.argmax.default: aten.max.dim,
    aten.argmin.default: aten.min.dim,
    aten.max.dim: aten.max.dim,
    aten.min.dim: aten.min.dim,
}


def _one(mark: str, outputs: int):
    """An operator (x, ..., dim, keepdim) that finds one entry of a dim."""

    def notation(node: Call) -> str | None:
        dims, arguments = letters(node), named(node.target, node.args, node.kwargs)
        if not dims:
            return None
        if arguments["dim"] is None:  # the place in the flattened tensor
            keep = " ".join("1" for _ in dims) if arguments["keepdim"] else ""
            return f"{' '.join(f'v{i}*' for i in range(len(dims)))} -> = {keep}"
        at = arguments["dim"] % len(dims)
        right = [*dims[:at], *(["1"] if arguments["keepdim"] else []), *dims[at + 1 :]]
        dims[at] = f"v{mark}"
        return f"{' '.join(dims)} -> {', '.join(['= ' + ' '.join(right)] * outputs)}"

    return notation


def _middle(node: Call) -> str:
    """The median of all entries."""
    return f"{' '.join(f'v{i}!' for i in range(len(node.args[0].meta['val'].shape)))} -> "


def _order(node: Call) -> str | None:
    """Sorting: the dim cannot be split."""
    dims = letters(node)
    if not dims:
        return None
    dims[named(node.target, node.args, node.kwargs)["dim"] % len(dims)] = "v!"
    line = " ".join(dims)
    return f"{line} -> {line}, {line}"


def _topk(node: Call) -> str | None:
    dims, arguments = letters(node), named(node.target, node.args, node.kwargs)
    if not dims:
        return None
    at = arguments["dim"] % len(dims)
    left, right = dims.copy(), dims.copy()
    left[at], right[at] = "v*", "k!"
    return f"{' '.join(left)} -> = {' '.join(right)}, = {' '.join(right)}"


def _among(node: Call) -> str:
    """The number of smaller sorted values: the sum over parts of them. Each row may have its own sorted values."""
    arguments = named(node.target, node.args, node.kwargs)
    entries: Call = arguments["self"]
    number = "s" if arguments.get("sorter") is None else "s!"
    dims = " ".join(names(entries.meta["val"].shape))
    lines = []
    for n in operands(node):
        *rows, _ = names(n.meta["val"].shape) or [""]
        lines.append(dims if n is entries else " ".join([*rows, number]))
    return f"{', '.join(lines)} -> {dims}"


def _isin(node: Call) -> str:
    """An element of any part of the others is an element of the others."""
    dims = " ".join(letters(node))
    return f"{dims}, {' '.join(f's{i}@' for i in range(len(node.args[1].meta['val'].shape)))} -> = {dims}"


rules(
    {
        aten.argmax.default: _one("*", 1),
        aten.argmin.default: _one("*", 1),
        aten.max.dim: _one("*", 2),
        aten.min.dim: _one("*", 2),
        aten.median.default: _middle,
        aten.nanmedian.default: _middle,
        aten.median.dim: _one("!", 2),
        aten.nanmedian.dim: _one("!", 2),
        aten.kthvalue.default: _one("!", 2),
        aten.mode.default: _one("!", 2),
        aten.sort.default: _order,
        aten.sort.stable: _order,
        aten.topk.default: _topk,
        aten.searchsorted.Tensor: _among,
        aten.bucketize.Tensor: _among,
        aten.isin.Tensor_Tensor: _isin,
    }
)


def _extreme(target, find):
    def local(here, x, dim=None, keepdim=False):
        if dim is None:
            return _extreme_of_all(here, x, target, keepdim)
        values, indices = find(x, dim, True)
        values = here.all_gather(values, "v")
        indices = here.all_gather(indices + here.offset("v"), "v")
        best, part = find(values, 0, True)
        results = best[0], indices.gather(0, part)[0]
        results = results if keepdim else tuple(r.squeeze(dim) for r in results)
        return results if target is find else results[1]

    return local


def _extreme_of_all(here, x: Tensor, target, keepdim: bool) -> Tensor:
    """The index of the maximum in the flattened tensor, the first of equal ones."""
    own = target(x.flatten(), 0)
    value = x.flatten().gather(0, own.view(1)).view(())
    place, stride, inside = torch.zeros_like(own), 1, own
    for dim in reversed(range(x.ndim)):
        factor, n = f"v{dim}", x.shape[dim]
        place = place + (inside % n + here.offset(factor)) * stride
        inside, stride = inside // n, stride * n * here.parts(factor)
    for dim in range(x.ndim):
        if here.axes(f"v{dim}"):
            values, places = here.all_gather(value, f"v{dim}"), here.all_gather(place, f"v{dim}")
            value = values.amax(0) if target is aten.argmax.default else values.amin(0)
            place = torch.where((values == value) | values.isnan(), places, stride).amin(0)
    return place.view([1] * x.ndim) if keepdim else place


def _side_by_side(x: Tensor, dim: int) -> Tensor:
    """(parts, ..., n, ...) -> (..., parts x n, ...)"""
    return x.movedim(0, dim).flatten(dim, dim + 1)


def _topk_of_parts(here, x, k, dim=-1, largest=True, sorted=True):
    dim = dim % x.ndim
    values, indices = aten.topk(x, min(k, x.shape[dim]), dim, largest, True)
    values = _side_by_side(here.all_gather(values, "v"), dim)
    indices = _side_by_side(here.all_gather(indices + here.offset("v"), "v"), dim)
    best, at = aten.topk(values, k, dim, largest, sorted)
    return best, indices.gather(dim, at)


CONTIGUOUS[aten.isin.Tensor_Tensor] = (0, 1)
CONTIGUOUS |= dict.fromkeys((aten.argmax.default, aten.argmin.default), (0,))  # they are flattened
CONTIGUOUS |= dict.fromkeys((aten.searchsorted.Tensor, aten.bucketize.Tensor), (0, 1))  # they warn when they copy


def _isin_parts(here, x, others, *, assume_unique=False, invert=False):
    contained = aten.isin.Tensor_Tensor(x, others, assume_unique=assume_unique, invert=invert).to(torch.uint8)
    for dim in range(others.ndim):
        contained = here.all_reduce(contained, f"s{dim}", "min" if invert else "max")
    return contained.bool()


LOCAL |= {target: _extreme(target, find) for target, find in EXTREMES.items()}
LOCAL[aten.isin.Tensor_Tensor] = _isin_parts
LOCAL[aten.topk.default] = _topk_of_parts


def _sends(of_each):
    """Values and their places, `of_each` row so many."""

    def sent(cut: Cut) -> list[tuple[str, int]]:
        x, n = cut.inputs[0], cut.inputs[0].shape[cut.dim(0)]
        numbers = 1 if cut.factor != "v" else x.numel // n * min(n, of_each(cut.node))
        return [("all_gather", numbers * x.dtype.itemsize), ("all_gather", numbers * 8)]

    return sent


SENDS |= dict.fromkeys(EXTREMES, _sends(lambda node: 1))
SENDS[aten.topk.default] = _sends(lambda node: node.args[1])
SENDS[aten.isin.Tensor_Tensor] = lambda cut: [("all_reduce", cut.outputs[0].numel)]  # a byte each
