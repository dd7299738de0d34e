"""The kernels of `tutti.nn.experts.experts` on a CPU, and where a GPU has no grouped product: loops over the experts.

Experts with few rows are combined in blocks of about `BLOCK` rows: a product for each expert, elementwise work for the
block. Only one block's rows are alive at a time. The products are as fast as `grouped_mm`, whose CPU kernel is such a
loop; no sorted copy of all tokens is needed, and no sum over a tensor of all results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.nn.experts.gate import gate_of
from tutti.nn.linear.fp8_rows import from_fp8, to_fp8
from tutti.nn.linear.scaled_mm import product

BLOCK = 512


@dataclass(frozen=True)
class ExpertBlock:
    """Some experts. pairs: (token, choice) sorted by expert, as token x k + choice. at: their range among all pairs.

    parts: the index of each expert, and the range of its rows in the block. matmul: the format of products, or "".
    """

    pairs: Tensor
    at: slice
    parts: list[tuple[int, slice]]
    matmul: str

    def products(self, left: Tensor, right: Tensor, out: Tensor, bias: Tensor | None = None) -> Tensor:
        """out[rows] = left[rows] @ right[expert] + bias[expert]"""
        for e, rows in self.parts:
            if self.matmul:
                out[rows] = product(left[rows], right[e], self.matmul)
                if bias is not None:
                    out[rows] += bias[e]
            elif bias is None:
                torch.mm(left[rows], right[e], out=out[rows])
            else:
                torch.addmm(bias[e], left[rows], right[e], out=out[rows])
        return out

    def sums(self, rows: Tensor, out: Tensor) -> None:
        """out[expert] = the sum of its rows"""
        for e, own in self.parts:
            torch.sum(rows[own], 0, out=out[e])

    def biases(self, bias: Tensor) -> Tensor:
        """The bias of each row."""
        counts = torch.tensor([rows.stop - rows.start for _, rows in self.parts], device=bias.device)
        return bias[[e for e, _ in self.parts]].repeat_interleave(counts, 0)

    def gradients(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """out[expert] = left[rows].T @ right[rows]"""
        for e, rows in self.parts:
            if self.matmul:
                out[e] = product(left[rows].T, right[rows], self.matmul)
            else:
                torch.mm(left[rows].T, right[rows], out=out[e])


def forward(x, index, weight, up, down, up_bias, down_bias, activation, first, total, matmul, filled, keep,
            only_rows=False):  # fmt: skip
    """(y, rows): rows are the results of the first product if `keep`; y is None if `only_rows`."""
    gate, (_, k), (_, hidden, width) = gate_of(activation), index.shape, down.shape
    blocks = list(_blocks(index, first, up.shape[0], total, matmul))
    rows = x.new_empty((blocks[-1].at.stop if keep and blocks else 0, up.shape[1]))
    y, scale = x.new_zeros((_used(x, blocks, k, filled), hidden), dtype=_wide(x)), weight.flatten()
    for block in blocks:
        tokens = block.pairs.div(k, rounding_mode="floor")
        up_rows = rows[block.at] if keep else x.new_empty((tokens.numel(), up.shape[1]))
        block.products(_rounded(x.index_select(0, tokens), matmul), up.mT, up_rows, up_bias)
        if not only_rows:
            out = x.new_empty((tokens.numel(), hidden))
            block.products(gate.forward(up_rows, width), down.mT, out, down_bias)
            y.index_add_(0, tokens, out.to(y.dtype).mul_(scale.index_select(0, block.pairs).unsqueeze(1)))
    return _whole(y, x), rows


def backward(grad, x, index, weight, up, down, up_bias, down_bias, activation, first, total, matmul, filled,
             rows):  # fmt: skip
    """Gradients of x, weight, up and down, and of the biases if there are any.

    With g = down^T grad of a row, before weighting: the gradient of its weight is g a + down_bias grad, without its
    result.
    """
    gate, (_, k), (_, hidden, width) = gate_of(activation), index.shape, down.shape
    blocks = list(_blocks(index, first, up.shape[0], total, matmul))
    gx, scale = x.new_zeros((_used(x, blocks, k, filled), hidden), dtype=_wide(x)), weight.flatten()
    gscale = torch.zeros_like(scale, dtype=gx.dtype)
    learned = [w for w in (up, down, up_bias, down_bias) if w is not None]
    gup, gdown, *gbiases = gradients = [torch.empty(w.shape, dtype=w.dtype, device=w.device) for w in learned]
    for e in {*range(len(up))} - {e for block in blocks for e, _ in block.parts}:
        for gradient in gradients:
            gradient[e] = 0
    for block in blocks:
        tokens = block.pairs.div(k, rounding_mode="floor")
        each, up_rows = scale.index_select(0, block.pairs).unsqueeze(1).to(x.dtype), rows[block.at]
        g, (a, active) = _rounded(grad.index_select(0, tokens), matmul), gate.forward_saving(up_rows, width)
        ga = block.products(g, down, torch.empty_like(a))
        of_weight = torch.linalg.vecdot(ga.to(gx.dtype), a.to(gx.dtype))
        block.gradients(g, a * each, gdown)
        gmade = gate.backward(up_rows, active, ga.mul_(each))
        block.gradients(gmade, _rounded(x.index_select(0, tokens), matmul), gup)
        if gbiases:
            of_weight += torch.linalg.vecdot(g.to(gx.dtype), block.biases(down_bias).to(gx.dtype))
            block.sums(gmade, gbiases[0])
            block.sums(g * each, gbiases[1])
        gscale.index_copy_(0, block.pairs, of_weight)
        gx.index_add_(0, tokens, block.products(gmade, up, g.new_empty((tokens.numel(), hidden))).to(gx.dtype))
    return [_whole(gx, x), gscale.view(weight.shape).to(weight.dtype), *gradients]


def _rounded(x: Tensor, matmul: str) -> Tensor:
    """Rows in the format in which they travel to their experts (`nn.linear.fp8_rows`)."""
    return from_fp8(to_fp8(x), x.shape[1], x.dtype) if matmul else x


def _used(x: Tensor, blocks: list[ExpertBlock], k: int, filled: int) -> int:
    """The number of rows to fill: all, or those up to the last token of a local expert."""
    return len(x) if filled < 0 else max((int(block.pairs.max()) // k + 1 for block in blocks), default=0)


def _whole(rows: Tensor, x: Tensor) -> Tensor:
    """Rows in the shape and dtype of x, undefined behind the last."""
    if len(rows) == len(x):
        return rows.to(x.dtype)
    out = torch.empty_like(x)
    out[: len(rows)] = rows
    return out


def _blocks(index: Tensor, first: int, count: int, total: int, matmul: str) -> Iterator[ExpertBlock]:
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
            yield ExpertBlock(order[start:end], slice(start - before, end - before), parts, matmul)
            start, parts = end, []


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
