"""The kernels of `tutti.nn.experts` on a GPU: one grouped product for all experts, without a synchronization.

Rows of other ranks' experts are sorted last. A grouped product does not write them, so they are undefined, and zeroed
before they are added to anything. `grouped_mm` takes bfloat16 of aligned rows; other operands use the loop, which
synchronizes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutti import compat
from tutti.nn import experts_loop
from tutti.nn.activation import activation_of, gated, gated_backward


def forward(x, index, weight, up, down, activation, first, total, keep, only_rows=False):
    """(y, rows): rows are the results of the first product if `keep`; y is None if `only_rows`."""
    if not _takes(x, up, down):
        return experts_loop.forward(x, index, weight, up, down, activation, first, total, keep, only_rows)
    act, (tokens, k) = activation_of(activation), index.shape
    order, ends, own = _sorted(index, first, up.shape[0])
    rows = compat.grouped_mm(x[order // k], up.transpose(1, 2), ends)
    if only_rows:
        return x, rows
    out = compat.grouped_mm(gated(act, rows, down.shape[2]), down.transpose(1, 2), ends)
    out = _zero_others(out, own).float() * weight.flatten()[order].unsqueeze(1)
    return _per_token(out, order, tokens, k).to(x.dtype), rows if keep else rows[:0]


def backward(grad, x, index, weight, up, down, activation, first, total, rows):
    """Gradients of x, weight, up and down; see `experts_loop.backward`."""
    if not _takes(x, up, down):
        return experts_loop.backward(grad, x, index, weight, up, down, activation, first, total, rows)
    act, (tokens, k), width = activation_of(activation), index.shape, down.shape[2]
    order, ends, own = _sorted(index, first, up.shape[0])
    each, g = weight.flatten()[order].unsqueeze(1).to(x.dtype), grad[order // k]
    rows = _zero_others(rows, own)
    ga = _zero_others(compat.grouped_mm(g, down, ends), own)
    gate = act.forward(rows[:, :width])
    a = gate * rows[:, width:] if rows.shape[1] > width else gate
    gscale = torch.zeros_like(weight.flatten(), dtype=torch.float32)
    gscale[order] = (ga.float() * a.float()).sum(1)
    gdown = compat.grouped_mm(g.T, a * each, ends)
    gmade = gated_backward(act, rows, gate, ga * each)
    gup = compat.grouped_mm(gmade.T, x[order // k], ends)
    gx = _zero_others(compat.grouped_mm(gmade, up, ends), own).float()
    return (
        _per_token(gx, order, tokens, k).to(x.dtype),
        gscale.view(weight.shape).to(weight.dtype),
        gup,
        gdown,
    )


def _takes(x: Tensor, up: Tensor, down: Tensor) -> bool:
    """Whether `grouped_mm` has a kernel: for bfloat16, and rows of a multiple of 16 bytes."""
    return x.dtype == torch.bfloat16 and len(x) > 0 and up.shape[2] % 8 == 0 and down.shape[2] % 8 == 0


def _sorted(index: Tensor, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """(token, choice) pairs sorted by expert, the end of each local expert's rows, and a mask of local rows."""
    flat = index.flatten() - first
    flat = torch.where((flat >= 0) & (flat < count), flat, count)
    ordered, order = flat.sort(stable=True)
    ends = torch.searchsorted(ordered, torch.arange(count, device=flat.device), right=True).to(torch.int32)
    return order, ends, (ordered < count).unsqueeze(1)


def _zero_others(rows: Tensor, own: Tensor) -> Tensor:
    return torch.where(own, rows, 0)


def _per_token(rows: Tensor, order: Tensor, tokens: int, k: int) -> Tensor:
    """Sums over the choices of each token, in a fixed order."""
    back = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    return rows[back].view(tokens, k, -1).sum(1)
