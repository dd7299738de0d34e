"""HQQ: half-quadratic quantization without data (Badri and Shaji 2023, https://mobiusml.github.io/hqq_blog/).

It minimizes sum |W - s (q - z)|^p over the weights of a group, p < 1, so that outliers count less. With an auxiliary
e for the error, two steps alternate, while beta grows: e = shrink(W - s (q - z), beta), the proximal operator of the p
norm, and the least-squares z = mean(q - (W - e) / s). Formats and kernels want z to be a code: it is rounded at the
end, and then the same steps find the least-squares s = sum (W - e) (q - z) / sum (q - z)^2. Without zeros, s alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.nn.quantized.scheme import Parts, Scheme, nonzero

POWER, BETA, GROWTH, ROUNDS = 0.7, 10.0, 1.01, 20


def shrink(x: Tensor, beta: float, power: float = POWER) -> Tensor:
    """The generalized soft threshold: sign(x) max(|x| - |x|^(p-1) / beta, 0)."""
    return x.sign() * (x.abs() - x.abs().clamp(min=1e-12) ** (power - 1) / beta).clamp(min=0)


def quantize(weight: Tensor, scheme: Scheme, rounds: int = ROUNDS) -> Parts:
    """The quantized weight of (n, k). Of each group, the better of this and nearest rounding by sum |error|^p."""
    nearest = scheme.quantize(weight)
    parts = weight.float().unflatten(1, (nearest.scales.shape[1], -1))
    most, beta = 2**scheme.bits - 1, BETA
    scales = nonzero(nearest.scales).unsqueeze(2)
    fixed = torch.full_like(scales, 2 ** (scheme.bits - 1))
    zeros = fixed if nearest.zeros is None else nearest.zeros.float().unsqueeze(2)
    for zeros_move in [True] * rounds * (not scheme.symmetric) + [False] * rounds:
        codes = (parts / scales + zeros).round().clamp(0, most)
        rest = parts - shrink(parts - scales * (codes - zeros), beta)
        if zeros_move:
            zeros = (codes - rest / scales).mean(2, keepdim=True)
        else:
            zeros = zeros.round().clamp(0, most)
            codes = codes - zeros
            fitted = (rest * codes).sum(2, keepdim=True) / (codes**2).sum(2, keepdim=True).clamp(min=1)
            scales = torch.where(fitted == 0, scales, fitted)
        beta *= GROWTH
    chosen = None if scheme.symmetric else zeros.squeeze(2).to(torch.uint8)
    stored = scheme.stored(scales.squeeze(2), weight.dtype)
    solved = Parts(scheme.codes(weight, stored, chosen), stored, chosen)
    losses = [_loss(weight, scheme.dequantize(x), stored.shape[1]) for x in (solved, nearest)]
    better = (losses[0] < losses[1]).unsqueeze(2)
    codes = torch.where(better, *(x.codes.unflatten(1, (stored.shape[1], -1)) for x in (solved, nearest))).flatten(1)
    better = better.squeeze(2)
    zero = None if chosen is None or nearest.zeros is None else torch.where(better, chosen, nearest.zeros)
    return Parts(codes, torch.where(better, stored, nearest.scales), zero)


def _loss(weight: Tensor, rounded: Tensor, groups: int) -> Tensor:
    return ((weight.float() - rounded).abs() ** POWER).unflatten(1, (groups, -1)).sum(2)
