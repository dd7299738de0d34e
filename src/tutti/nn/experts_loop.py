"""The kernels of `tutti.nn.experts` on a CPU: a loop over the experts that have tokens.

What is alive at once is one expert's rows. Measured on two cores, this takes as long as `grouped_mm`, whose CPU kernel
is such a loop itself, needs no copy of all tokens in the order of experts, and no sum over a tensor of all results.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tutti.nn.activation import activation_of


def forward(x, index, weight, up, down, activation, first, total, keep, only_rows=False):
    """(y, rows): rows are the results of the first product where they are to be kept; y is left out on demand."""
    act, k = activation_of(activation), index.shape[1]
    parts = list(_by_expert(index, first, up.shape[0], total))
    rows = x.new_empty((sum(pairs.numel() for _, pairs, _ in parts) if keep else 0, up.shape[1]))
    y, scale = torch.zeros_like(x, dtype=_wide(x)), weight.flatten()
    for e, pairs, at in parts:
        tokens = pairs.div(k, rounding_mode="floor")
        made = rows[at] if keep else x.new_empty((pairs.numel(), up.shape[1]))
        torch.mm(x.index_select(0, tokens), up[e].T, out=made)
        if not only_rows:
            out = torch.mm(_activated(act, made, down.shape[2]), down[e].T).to(y.dtype)
            y.index_add_(0, tokens, out.mul_(scale.index_select(0, pairs).unsqueeze(1)))
    return y.to(x.dtype), rows


def backward(grad, x, index, weight, up, down, activation, first, total, rows):
    """Gradients of x, weight, up and down.

    With g = down^T grad of a row, before it is weighted: that of its weight is g a, and no result is needed for it.
    """
    act, k, width = activation_of(activation), index.shape[1], down.shape[2]
    gx, scale = torch.zeros_like(x, dtype=_wide(x)), weight.flatten()
    gscale = torch.zeros_like(scale, dtype=gx.dtype)
    gup, gdown = (torch.zeros(w.shape, dtype=w.dtype, device=w.device) for w in (up, down))
    for e, pairs, at in _by_expert(index, first, up.shape[0], total):
        tokens = pairs.div(k, rounding_mode="floor")
        each, made = scale.index_select(0, pairs).unsqueeze(1).to(x.dtype), rows[at]
        g = grad.index_select(0, tokens)
        ga, a = torch.mm(g, down[e]), _activated(act, made, width)
        gscale.index_copy_(0, pairs, torch.linalg.vecdot(ga.to(gx.dtype), a.to(gx.dtype)))
        torch.mm(g.T, a.mul_(each), out=gdown[e])
        gmade = _gradient(act, made, ga.mul_(each), width)
        torch.mm(gmade.T, x.index_select(0, tokens), out=gup[e])
        gx.index_add_(0, tokens, torch.mm(gmade, up[e]).to(gx.dtype))
    return gx.to(x.dtype), gscale.view(weight.shape).to(weight.dtype), gup, gdown


def _activated(act, made: Tensor, width: int) -> Tensor:
    """(n, width) of what the first product made: gate and up side by side, or up alone."""
    gate = act.forward(made[:, :width])
    return gate.mul_(made[:, width:]) if made.shape[1] > width else gate


def _gradient(act, made: Tensor, ga: Tensor, width: int) -> Tensor:
    """Of what the first product made, from that of `_activated`."""
    if made.shape[1] == width:
        return act.backward(ga, made)
    gate, up = made[:, :width], made[:, width:]
    gmade = torch.empty_like(made)
    torch.mul(ga, act.forward(gate), out=gmade[:, width:])
    gmade[:, :width] = act.backward(ga.mul_(up), gate)
    return gmade


def _by_expert(index: Tensor, first: int, count: int, total: int) -> Iterator[tuple[int, Tensor, slice]]:
    """Of each expert here that has tokens: its place, its (token, choice) pairs in order, and where its rows are."""
    flat = index.flatten()
    counts = torch.bincount(flat, minlength=total)
    if counts.numel() > total:
        raise IndexError(f"experts: expert {counts.numel() - 1} of {total}")
    ends, order, counts = counts.cumsum(0).tolist(), flat.argsort(stable=True), counts.tolist()
    start = ends[first] - counts[first]
    for e in range(count):
        n, end = counts[first + e], ends[first + e]
        if n:
            yield e, order[end - n : end], slice(end - n - start, end - start)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
