"""Border rows of neighbouring parts, for convolutions, pools and rolls over a split dim.

Parts are contiguous and of equal size. `before` and `after` count the rows needed before and after a part's own. If a
part has fewer rows, they also come from the neighbours' neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def halo(here, x: Tensor, factor: str, dim: int, before: int, after: int, edge: float | None = 0.0) -> Tensor:
    """A part's rows along `dim` with the neighbours' rows around them. A negative count drops own rows.

    edge: the value of rows past the first and last part, or None to wrap around.
    """
    n = x.shape[dim]
    rows = [x]
    for hop, count in _hops(before, n):
        rows.insert(0, here.ppermute(x.narrow(dim, n - count, count), factor, hop, edge))
    for hop, count in _hops(after, n):
        rows.append(here.ppermute(x.narrow(dim, 0, count), factor, -hop, edge))
    x = torch.cat(rows, dim) if len(rows) > 1 else x
    start, end = max(0, -before), x.shape[dim] - max(0, -after)
    return x if (start, end) == (0, x.shape[dim]) else x.narrow(dim, start, end - start)


def unhalo(here, x: Tensor, factor: str, dim: int, before: int, after: int, wrap: bool = False) -> Tensor:
    """The adjoint of `halo`: border rows are sent back to their owners and added."""
    edge = None if wrap else 0.0
    n = x.shape[dim] - before - after
    own = pad(x.narrow(dim, max(0, before), x.shape[dim] - max(0, before) - max(0, after)), dim, -before, -after)
    at = max(0, before)
    for hop, count in _hops(before, n):
        at -= count
        own = own + pad(here.ppermute(x.narrow(dim, at, count), factor, -hop, edge), dim, n - count, 0)
    at = x.shape[dim] - max(0, after)
    for hop, count in _hops(after, n):
        own = own + pad(here.ppermute(x.narrow(dim, at, count), factor, hop, edge), dim, 0, n - count)
        at += count
    return own


def halo_rows(before: int, after: int) -> int:
    """The number of rows that a part sends, equal to what it receives."""
    return max(0, before) + max(0, after)


def _hops(rows: int, n: int) -> Iterator[tuple[int, int]]:
    """(distance of the neighbour, number of its n rows needed), nearest first."""
    hop = 1
    while rows > 0:
        yield hop, min(rows, n)
        rows, hop = rows - n, hop + 1


def pad(x: Tensor, dim: int, before: int, after: int) -> Tensor:
    """Zero rows in front and behind; negative counts add none."""
    pads = [0, 0] * (x.ndim - dim)
    pads[-2:] = max(0, before), max(0, after)
    return torch.constant_pad_nd(x, pads) if any(pads) else x
