"""The kernels of `tutti.nn.experts` on a CPU, and where a GPU has no grouped product: loops over the experts.

Experts with few rows are combined in blocks of about `BLOCK` rows: a product for each expert, elementwise work for the
block. Only one block's rows are alive at a time. The products are as fast as `grouped_mm`, whose CPU kernel is such a
loop; no sorted copy of all tokens is needed, and no sum over a tensor of all results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.nn.activation import activation_of, gated, gated_backward

BLOCK = 512


@dataclass(frozen=True)
class Block:
    """Some experts. pairs: (token, choice) sorted by expert, as token x k + choice. at: their range among all pairs.

    parts: the index of each expert, and the range of its rows in the block.
    """

    pairs: Tensor
    at: slice
    parts: list[tuple[int, slice]]

    def products(self, left: Tensor, right: Tensor, out: Tensor) -> Tensor:
        """out[rows] = left[rows] @ right[expert]"""
        for e, rows in self.parts:
            torch.mm(left[rows], right[e], out=out[rows])
        return out

    def gradients(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """out[expert] = left[rows].T @ right[rows]"""
        for e, rows in self.parts:
            torch.mm(left[rows].T, right[rows], out=out[e])


def forward(x, index, weight, up, down, activation, first, total, keep, only_rows=False):
    """(y, rows): rows are the results of the first product if `keep`; y is None if `only_rows`."""
    act, (_, k), (_, hidden, width) = activation_of(activation), index.shape, down.shape
    blocks = list(_blocks(index, first, up.shape[0], total))
    rows = x.new_empty((blocks[-1].at.stop if keep and blocks else 0, up.shape[1]))
    y, scale = x.new_zeros(x.shape, dtype=_wide(x)), weight.flatten()
    for block in blocks:
        tokens = block.pairs.div(k, rounding_mode="floor")
        made = rows[block.at] if keep else x.new_empty((tokens.numel(), up.shape[1]))
        block.products(x.index_select(0, tokens), up.mT, made)
        if not only_rows:
            out = block.products(gated(act, made, width), down.mT, x.new_empty((tokens.numel(), hidden)))
            y.index_add_(0, tokens, out.to(y.dtype).mul_(scale.index_select(0, block.pairs).unsqueeze(1)))
    return y.to(x.dtype), rows


def backward(grad, x, index, weight, up, down, activation, first, total, rows):
    """Gradients of x, weight, up and down.

    With g = down^T grad of a row, before weighting: the gradient of its weight is g a, without its result.
    """
    act, (_, k), (_, hidden, width) = activation_of(activation), index.shape, down.shape
    gx, scale = x.new_zeros(x.shape, dtype=_wide(x)), weight.flatten()
    gscale = torch.zeros_like(scale, dtype=gx.dtype)
    gup, gdown = (torch.empty(w.shape, dtype=w.dtype, device=w.device) for w in (up, down))
    blocks = list(_blocks(index, first, up.shape[0], total))
    for e in {*range(len(up))} - {e for block in blocks for e, _ in block.parts}:
        gup[e], gdown[e] = 0, 0
    for block in blocks:
        tokens = block.pairs.div(k, rounding_mode="floor")
        each, made = scale.index_select(0, block.pairs).unsqueeze(1).to(x.dtype), rows[block.at]
        g, gate = grad.index_select(0, tokens), act.forward(made[:, :width])
        a = gate * made[:, width:] if made.shape[1] > width else gate
        ga = block.products(g, down, torch.empty_like(a))
        gscale.index_copy_(0, block.pairs, torch.linalg.vecdot(ga.to(gx.dtype), a.to(gx.dtype)))
        block.gradients(g, a * each, gdown)
        gmade = gated_backward(act, made, gate, ga.mul_(each))
        block.gradients(gmade, x.index_select(0, tokens), gup)
        gx.index_add_(0, tokens, block.products(gmade, up, g.new_empty((tokens.numel(), hidden))).to(gx.dtype))
    return gx.to(x.dtype), gscale.view(weight.shape).to(weight.dtype), gup, gdown


def _blocks(index: Tensor, first: int, count: int, total: int) -> Iterator[Block]:
    """The local experts with tokens, in order."""
    flat = index.flatten()
    counts = torch.bincount(flat, minlength=total)
    if counts.numel() > total:
        raise IndexError(f"experts: index {counts.numel() - 1} is out of range; there are {total} experts")
    order, counts = flat.argsort(stable=True), counts.tolist()
    least = BLOCK if index.device.type == "cpu" else 1  # a GPU would add a token's rows in any order
    start = end = before = sum(counts[:first])
    parts: list[tuple[int, slice]] = []
    for e, n in enumerate(counts[first : first + count]):
        if n:
            parts.append((e, slice(end - start, end - start + n)))
            end += n
        if end > start and (end - start >= least or e == count - 1):
            yield Block(order[start:end], slice(start - before, end - before), parts)
            start, parts = end, []


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
