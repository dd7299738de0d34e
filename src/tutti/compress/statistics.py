"""What calibration data says of the inputs of a layer: second moments, ranges, and how many tokens there were."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Statistics:
    """Statistics of the inputs (tokens, k) of a layer, in float32.

    gram: sum of x x^T (k, k). total: sum of |x| (k). most: the largest |x| (k). count: tokens.
    """

    k: int
    count: int = 0
    gram: Tensor = field(init=False)
    total: Tensor = field(init=False)
    most: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.gram = torch.zeros(self.k, self.k)
        self.total, self.most = torch.zeros(self.k), torch.zeros(self.k)

    @torch.no_grad()
    def add(self, x: Tensor) -> None:
        """Take inputs (tokens, k)."""
        if len(x):
            x = x.float()
            self.gram.addmm_(x.T, x)
            magnitudes = x.abs()
            self.total += magnitudes.sum(0)
            self.most = torch.maximum(self.most, magnitudes.amax(0))
            self.count += len(x)

    def divided(self, factors: Tensor) -> Statistics:
        """The statistics of the inputs divided by factors (k)."""
        scaled = Statistics(self.k, self.count)
        scaled.gram = self.gram / factors / factors.unsqueeze(1)
        scaled.total, scaled.most = self.total / factors, self.most / factors
        return scaled

    def error(self, weight: Tensor, rounded: Tensor) -> float:
        """||X (W - R)^T|| / ||X W^T|| for weights (n, k)."""
        change, whole = weight.float() - rounded.float(), weight.float()
        return float((self.loss(change) / self.loss(whole).clamp(min=1e-30)).sqrt())

    def loss(self, change: Tensor) -> Tensor:
        """||X D^T||^2 for the change D (n, k) of a weight."""
        return (change @ self.gram * change).sum().clamp(min=0)
