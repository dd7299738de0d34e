"""Rows of a split dim, by index: each rank reads and writes its own rows.

An index out of range is an error on every rank, as without a split: it is mapped to one that is too large.
"""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten


def read_rows(here, factor: str, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The indices counted from this rank's first row, 0 for rows of other ranks; and a mask of the rank's own."""
    return own_rows(here, factor, numbers, elsewhere=0, beyond=here.size(factor))


def write_rows(here, factor: str, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The same for writing: rows of other ranks map to a spare row after this rank's own."""
    return own_rows(here, factor, numbers, elsewhere=here.size(factor), beyond=here.size(factor) + 1)


def own_rows(here, factor: str, numbers: Tensor, elsewhere: int, beyond: int) -> tuple[Tensor, Tensor]:
    """The indices counted from this rank's first row, and a mask of the rank's own.

    elsewhere, beyond: the index for a row of another rank, and for one out of range.
    """
    first, rows = here.offset(factor), here.size(factor)
    own = (numbers >= first) & (numbers < first + rows)
    exists = (numbers >= 0) & (numbers < here.whole(factor))
    counted = torch.where(own, numbers - first, torch.where(exists, elsewhere, beyond))
    return counted.to(numbers.dtype), own


def only(x: Tensor, own: Tensor) -> Tensor:
    """Values read from own rows, and zero (False) elsewhere: the sum over ranks gives all of them."""
    return x.masked_fill(~own, 0)


def from_end(here, factor: str, numbers: Tensor) -> Tensor:
    """Negative numbers count from the end of the whole dim."""
    return torch.where(numbers < 0, numbers + here.whole(factor), numbers)


def with_spare(x: Tensor, *dims: int) -> Tensor:
    """The tensor with one more row at the end of these dims."""
    pads = [0] * (2 * x.ndim)
    for dim in dims:
        pads[2 * (x.ndim - 1 - dim % x.ndim) + 1] = 1
    return aten.constant_pad_nd(x, pads)


def without_spare(x: Tensor, *dims: int) -> Tensor:
    for dim in dims:
        x = x.narrow(dim, 0, x.shape[dim] - 1)
    return x
