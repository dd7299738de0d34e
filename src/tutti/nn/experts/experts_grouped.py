"""The kernels of `tutti.nn.experts.experts` on a GPU: one grouped product for all experts.

Rows of other ranks' experts are sorted last and left out, for which the host waits to know how many rows are local (an
exchange of tokens waits anyway). With all experts here, all rows are, and nothing waits. `grouped_mm` takes bfloat16 of
aligned rows; other operands use the loop, which waits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutti import compat
from tutti.nn.experts import experts_loop
from tutti.nn.experts.gate import gate_of


def forward(x, index, weight, up, down, up_bias, down_bias, activation, first, total, matmul, filled, keep,
            only_rows=False):  # fmt: skip
    """(y, rows): rows are the results of the first product if `keep`; y is None if `only_rows`."""
    operands = (x, index, weight, up, down, up_bias, down_bias, activation, first, total, matmul, filled)
    if matmul or not _takes(x, up, down):
        return experts_loop.forward(*operands, keep, only_rows)
    gate, (tokens, k) = gate_of(activation), index.shape
    order, ends, expert = _sorted(index, first, up.shape[0], total)
    if not len(order):
        return experts_loop.forward(*operands, keep, only_rows)
    rows = compat.grouped_mm(x[order // k], up.transpose(1, 2), ends)
    if up_bias is not None:
        rows = rows + up_bias[expert]
    if only_rows:
        return x, rows
    out = compat.grouped_mm(gate.forward(rows, down.shape[2]), down.transpose(1, 2), ends)
    if down_bias is not None:
        out = out + down_bias[expert]
    out = out.float() * weight.flatten()[order].unsqueeze(1)
    return _per_token(out, order, tokens, k).to(x.dtype), rows if keep else rows[:0]


def backward(grad, x, index, weight, up, down, up_bias, down_bias, activation, first, total, matmul, filled,
             rows):  # fmt: skip
    """Gradients of x, weight, up, down and the biases; see `experts_loop.backward`."""
    operands = (grad, x, index, weight, up, down, up_bias, down_bias, activation, first, total, matmul, filled, rows)
    if matmul or not _takes(x, up, down):
        return experts_loop.backward(*operands)
    gate, (tokens, k), width = gate_of(activation), index.shape, down.shape[2]
    order, ends, expert = _sorted(index, first, up.shape[0], total)
    if not len(order):
        return experts_loop.backward(*operands)
    each, g = weight.flatten()[order].unsqueeze(1).to(x.dtype), grad[order // k]
    ga = compat.grouped_mm(g, down, ends)
    a, active = gate.forward_saving(rows, width)
    gscale = torch.zeros_like(weight.flatten(), dtype=torch.float32)
    gscale[order] = (ga.float() * a.float()).sum(1)
    gdown = compat.grouped_mm(g.T, a * each, ends)
    gmade = gate.backward(rows, active, ga * each)
    gup = compat.grouped_mm(gmade.T, x[order // k], ends)
    gx = compat.grouped_mm(gmade, up, ends).float()
    gbiases = []
    if down_bias is not None:
        gscale[order] += (g.float() * down_bias[expert].float()).sum(1)
        gbiases = [_per_expert(gmade, ends).to(up_bias.dtype), _per_expert(g * each, ends).to(down_bias.dtype)]
    gradients = [_per_token(gx, order, tokens, k).to(x.dtype), gscale.view(weight.shape).to(weight.dtype), gup, gdown]
    return [*gradients, *gbiases]


def _takes(x: Tensor, up: Tensor, down: Tensor) -> bool:
    """Whether `grouped_mm` has a kernel: for bfloat16, and rows of a multiple of 16 bytes."""
    return x.dtype == torch.bfloat16 and len(x) > 0 and up.shape[2] % 8 == 0 and down.shape[2] % 8 == 0


def _sorted(index: Tensor, first: int, count: int, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Local (token, choice) pairs sorted by expert, the end of each expert's rows, and the expert of each row."""
    flat = index.flatten() - first
    flat = torch.where((flat >= 0) & (flat < count), flat, count)
    ordered, order = flat.sort(stable=True)
    ends = torch.searchsorted(ordered, torch.arange(count, device=flat.device), right=True).to(torch.int32)
    local = len(order) if count == total else int(ends[-1])
    return order[:local], ends, ordered[:local].clamp(max=count - 1)  # an index out of range reads no other memory


def _per_expert(rows: Tensor, ends: Tensor) -> Tensor:
    """The sum of each expert's rows, in float32 and a fixed order."""
    lengths = ends.diff(prepend=ends.new_zeros(1)).long()
    return torch.segment_reduce(rows.float(), "sum", lengths=lengths, unsafe=True)


def _per_token(rows: Tensor, order: Tensor, tokens: int, k: int) -> Tensor:
    """Sums over the choices of each token, in a fixed order."""
    place = torch.full((tokens * k,), -1, device=order.device)
    place[order] = torch.arange(len(order), device=order.device)
    if len(order) == len(place):
        return rows[place].view(tokens, k, -1).sum(1)
    total = rows.new_zeros((tokens, rows.shape[1]))
    for choice in place.view(tokens, k).unbind(1):  # a token once, so that sums have one order
        token = (choice >= 0).nonzero().squeeze(1)
        total.index_add_(0, token, rows[choice[token]])
    return total
