"""AWQ (Lin et al. 2023, arXiv:2306.00978): inputs that are large get finer weights, then ranges are cut.

Scales: with s = (mean |x|)^r, the loss is ||X W^T - (X / s) Q(W s)^T||^2 summed over the layers that read X; r is the
best of a grid of 20 from 0 on. 1 / s goes into what makes X (`folds`). Ranges: the range of each group is multiplied
by the best of 1, 0.95, ... 0.5, by the loss that the group alone has. Losses come from the second moments of X.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tutti.compress.statistics import Statistics
from tutti.nn.quantized.scheme import Parts, Scheme

POWERS = [i / 20 for i in range(20)]
CUTS = [1 - i / 20 for i in range(11)]


def scales(mean: Tensor, power: float) -> Tensor:
    """s (k) = mean^power, where the product of the largest and the smallest is 1."""
    powers = mean.clamp(min=1e-4) ** power
    return powers / (powers.amax() * powers.amin()).sqrt()


def search(
    weights: Mapping[str, Tensor],
    schemes: Mapping[str, Scheme],
    statistics: Statistics,
    tied: Callable[[Tensor], Tensor] = lambda s: s,
) -> Tensor | None:
    """The best factors (k) of the inputs of layers with weights (n, k); None if 1 is the best, or there is no data.

    tied: makes factors such that they can be applied.
    """
    if not statistics.count:
        return None
    mean, best = statistics.total / statistics.count, None
    least = sum(loss(w, torch.ones_like(mean), schemes[name], statistics) for name, w in weights.items())
    for power in POWERS[1:]:
        s = tied(scales(mean, power))
        lost = sum(loss(w, s, schemes[name], statistics) for name, w in weights.items())
        if lost < least:
            best, least = s, lost
    return best


def loss(weight: Tensor, s: Tensor, scheme: Scheme, statistics: Statistics) -> float:
    """||X W^T - (X / s) Q(W s)^T||^2."""
    rounded = scheme.rounded((weight.float() * s).to(weight.dtype)) / s
    return float(statistics.loss(rounded - weight.float()))


def clipped(weight: Tensor, scheme: Scheme, gram: Tensor) -> Parts:
    """The nearest quantized weight of (n, k) with the best range for each group. gram: sum of x x^T (k, k)."""
    best = scheme.quantize(weight)
    least = losses(weight, scheme.dequantize(best), gram, best.scales.shape[1])
    for cut in CUTS[1:]:
        grid = scheme.grid(weight * cut)
        parts = Parts(scheme.codes(weight, *grid), *grid)
        lost = losses(weight, scheme.dequantize(parts), gram, parts.scales.shape[1])
        better = lost < least
        least = torch.where(better, lost, least)
        best = chosen(better, parts, best)
    return best


def chosen(better: Tensor, one: Parts, other: Parts) -> Parts:
    """The groups of one quantized weight where `better` (n, groups) is true, and of another elsewhere."""
    groups = better.shape[1]
    codes = torch.where(better.unsqueeze(2), *(x.codes.unflatten(1, (groups, -1)) for x in (one, other))).flatten(1)
    zeros = None
    if one.zeros is not None and other.zeros is not None:
        zeros = torch.where(better, one.zeros, other.zeros)
    return Parts(codes, torch.where(better, one.scales, other.scales), zeros)


def losses(weight: Tensor, rounded: Tensor, gram: Tensor, groups: int) -> Tensor:
    """||X_g D_g^T||^2 (n, groups) of the change D of each row and group alone."""
    change = (weight.float() - rounded).unflatten(1, (groups, -1)).transpose(0, 1)  # groups, n, size
    size = change.shape[2]
    own = torch.stack([gram[i : i + size, i : i + size] for i in range(0, groups * size, size)])
    return ((change @ own) * change).sum(2).T
