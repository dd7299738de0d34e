"""Sums and gathers over graphs of any number of atoms, packed without padding or in rows of equal size.

Features are (..., atoms, F), indices (..., edges), with the same leading dims: none for one packed batch, one for rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def take(features: Tensor, index: Tensor) -> Tensor:
    """(..., n, *F), (..., edges) -> (..., edges, *F): the features of each index."""
    if index.ndim == 1:
        return features.index_select(0, index)
    return torch.gather(features, index.ndim - 1, _widened(index, features))


def sum_at(values: Tensor, index: Tensor, count: int) -> Tensor:
    """(..., edges, *F), (..., edges) -> (..., count, *F): the sum of values at each index."""
    shape = [*index.shape[:-1], count, *values.shape[index.ndim :]]
    zeros = torch.zeros(shape, dtype=values.dtype, device=values.device)
    if index.ndim == 1:
        return zeros.index_add(0, index, values)
    return zeros.scatter_add(index.ndim - 1, _widened(index, values), values)


def largest_at(values: Tensor, index: Tensor, start: Tensor) -> Tensor:
    """(..., edges, *F), (..., edges), (..., count, *F): the largest of `start` and of values at each index."""
    return start.scatter_reduce(index.ndim - 1, _widened(index, values), values, "amax")


def _widened(index: Tensor, values: Tensor) -> Tensor:
    extra = values.shape[index.ndim :]
    return index.reshape(*index.shape, *[1] * len(extra)).expand(*index.shape, *extra)
