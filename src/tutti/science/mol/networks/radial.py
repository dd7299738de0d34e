"""Radial basis functions and cutoff functions of distances (...,)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


def shifted_softplus(x: Tensor) -> Tensor:
    """ln(1 + e^x) - ln 2: smooth, and 0 at 0."""
    return nn.functional.softplus(x) - math.log(2.0)


def cosine_cutoff(distance: Tensor, cutoff: float) -> Tensor:
    """(cos(pi d / rc) + 1) / 2 within the cutoff, 0 beyond."""
    return 0.5 * (torch.cos(math.pi / cutoff * distance.clamp(max=cutoff)) + 1)


def polynomial_cutoff(distance: Tensor, cutoff: float) -> Tensor:
    """1 - 6 x^5 + 15 x^4 - 10 x^3 of x = d / rc, 0 beyond: two continuous derivatives."""
    x = (distance / cutoff).clamp(max=1)
    return 1 - x**3 * (10 - 15 * x + 6 * x * x)


@dataclass(frozen=True)
class Gaussians:
    """exp(-(d - mu_k)^2 / (2 delta^2)), mu_k from 0 to the cutoff at intervals of delta: (...) -> (..., number)."""

    number: int
    cutoff: float

    def __call__(self, distance: Tensor) -> Tensor:
        per_delta = (self.number - 1) / self.cutoff
        k = torch.arange(self.number, dtype=distance.dtype, device=distance.device)
        return torch.exp(-0.5 * (distance.unsqueeze(-1) * per_delta - k).square())


@dataclass(frozen=True)
class LogGaussians:
    """2 exp(-(ln(d / rc) - mu_k)^2 / (2 sigma^2)) - 1, mu_k from ln(first) to 0 at intervals of about `step`.

    first: the shortest distance of interest, as a fraction of the cutoff. (...) -> (..., number)
    """

    cutoff: float
    first: float = 0.04
    step: float = 0.0512
    sigma: float = 0.3

    @property
    def number(self) -> int:
        return round(-math.log(self.first) / self.step) + 1

    def __call__(self, distance: Tensor) -> Tensor:
        k = torch.arange(self.number, dtype=distance.dtype, device=distance.device)
        mu = math.log(self.first) * (1 - k / (self.number - 1))
        x = torch.log(distance / self.cutoff).unsqueeze(-1) - mu
        return 2 * torch.exp(-0.5 / self.sigma**2 * x * x) - 1
