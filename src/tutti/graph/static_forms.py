"""Other forms of operators whose results have shapes that depend on values, or that no fake tensor can have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def static_form(func: Any, args: tuple, kwargs: dict) -> Callable | None:
    """A function of the same arguments that gives the same by other operators; None where there is none."""
    form = FORMS.get(func)
    if func is aten.bincount.default and not _minlength(*args, **kwargs):
        return None
    return form


def _minlength(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> int:
    return minlength


def _bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """`minlength` counts; a value that is not below it is an IndexError, where torch would make the result longer."""
    ones = torch.ones_like(x) if weights is None else weights
    ones = ones.to(torch.float64) if ones.is_floating_point() and ones.dtype is not torch.float32 else ones
    return torch.zeros(minlength, dtype=ones.dtype, device=x.device).index_add(0, x.long(), ones)


def _embedding_renorm(weight: Tensor, indices: Tensor, max_norm: float, norm_type: float) -> Tensor:
    """Rows that are looked up and longer than `max_norm` are scaled to it, in place."""
    seen = torch.zeros(len(weight), dtype=weight.dtype, device=weight.device).index_fill(0, indices.reshape(-1), 1)
    norms = torch.linalg.vector_norm(weight, norm_type, dim=1)
    scale = torch.where((seen > 0) & (norms > max_norm), max_norm / (norms + 1e-7), torch.ones_like(norms))
    return weight.copy_(weight * scale[:, None])


FORMS: dict[Any, Callable] = {
    aten.bincount.default: _bincount,
    aten.embedding_renorm_.default: _embedding_renorm,
    aten._is_all_true.default: lambda x: x.all(),
    aten._is_any_true.default: lambda x: x.any(),
}


def same_view(whole: Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
    """`whole.as_strided(shape, strides, offset)` of a contiguous tensor, by a slice, a reshape and a permutation where
    these are enough: they can be split over devices."""
    order = sorted(range(len(shape)), key=lambda d: (-strides[d], d))
    dense, expected = True, 1
    for d in reversed(order):
        dense = dense and (shape[d] == 1 or strides[d] == expected)
        expected *= shape[d]
    if not dense:
        return whole.as_strided(list(shape), list(strides), offset)
    flat = whole if expected == whole.numel() else whole.reshape(-1)[offset : offset + expected]
    inverse = [order.index(d) for d in range(len(shape))]
    return flat.reshape([shape[d] for d in order]).permute(inverse)
