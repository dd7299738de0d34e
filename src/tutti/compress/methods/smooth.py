"""SmoothQuant (Xiao et al. 2022, arXiv:2211.10438): large inputs are divided, and weights multiplied instead.

s_j = max |x_j|^a / max_i |w_ij|^(1 - a) of input j; x / s and W s have the product that x and W have.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def factors(weights: Sequence[Tensor], most: Tensor, strength: float = 0.5) -> Tensor:
    """s (k) for weights (n, k) of layers with one input; 1 for inputs that are always 0.

    most: the largest |x| (k). strength: a.
    """
    largest = torch.stack([w.float().abs().amax(0) for w in weights]).amax(0)
    ratios = most.clamp(min=1e-5) ** strength / largest.clamp(min=1e-5) ** (1 - strength)
    return torch.where((most > 0) & (largest > 0), ratios.clamp(min=1e-5), 1.0)
