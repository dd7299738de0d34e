"""Products of groups of rows with a matrix each, of any dtype and on any device (`torch.nn.functional.grouped_mm`).

| a | b | result | groups |
|---|---|---|---|
| (S, K) | (G, K, N) | (S, N) | of the rows of a |
| (M, S) | (S, N) | (G, M, N) | of the dim that is contracted |
| (G, M, K) | (K, S) | (M, S) | of the columns of b |

ends: (E,) int32 or int64, the end of each of all E groups. This call computes groups `first` to `first + count - 1`;
results of other groups, and beyond the last end, are zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutti import compat
from tutti.nn.once import differentiable_once

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define("grouped_mm(Tensor a, Tensor b, Tensor ends, int first, int count) -> Tensor")


def shape_of(a: Tensor, b: Tensor, count: int) -> list[int]:
    """The shape of the result."""
    if a.ndim == b.ndim == 2:
        return [count, a.shape[0], b.shape[1]]
    return [a.shape[0] if a.ndim == 2 else a.shape[1], b.shape[-1]]


def kernel(a: Tensor, b: Tensor, ends: Tensor, first: int, count: int) -> Tensor:
    """A product per group; on a GPU the fused one if it supports these operands."""
    if _takes(a, b, ends, first, count):
        out = compat.grouped_mm(a, b, ends.to(torch.int32))
        return torch.where((torch.arange(len(a), device=a.device) < ends[-1]).unsqueeze(1), out, 0)
    out = a.new_zeros(shape_of(a, b, count))
    bounds = [0, *ends.tolist()]
    for g in range(count):
        rows = slice(bounds[first + g], bounds[first + g + 1])
        if a.ndim == b.ndim == 2:
            torch.mm(a[:, rows], b[rows], out=out[g])
        elif a.ndim == 2 and rows.stop > rows.start:
            torch.mm(a[rows], b[g], out=out[rows])
        elif rows.stop > rows.start:
            out[:, rows] = a[g] @ b[:, rows]
    return out


def _takes(a: Tensor, b: Tensor, ends: Tensor, first: int, count: int) -> bool:
    """Whether torch's kernel supports it: grouped rows of `a`, bfloat16, rows of multiples of 16 bytes, all groups."""
    kinds = a.device.type == "cuda" and a.dtype == torch.bfloat16 and (a.ndim, b.ndim) == (2, 3)
    return kinds and first == 0 and count == len(ends) and len(a) > 0 and a.shape[1] % 8 == 0 and b.shape[2] % 8 == 0


_library.impl("grouped_mm", kernel, "CPU")
_library.impl("grouped_mm", kernel, "CUDA")
torch.library.register_fake("tutti::grouped_mm", lambda a, b, ends, first, count: a.new_empty(shape_of(a, b, count)))
differentiable_once("grouped_mm", "grouped_mm")
