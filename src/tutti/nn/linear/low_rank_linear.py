"""A linear layer whose weight is a product of two smaller ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class LowRankLinear(nn.Module):
    """A linear layer y = b(a(x)) with the weight (n, k) of rank r that is B A, and r (n + k) numbers.

    a: a linear layer with the weight A (r, k). b: one with B (n, r), and the bias. Either may be quantized.
    """

    a: Any
    b: Any

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        bias: nn.Parameter | None = None,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
    ):
        super().__init__()
        self.in_features, self.out_features, self.rank, self.dtype = in_features, out_features, rank, dtype
        options: dict[str, Any] = dict(bias=False, dtype=dtype, device="meta")
        self.a, self.b = nn.Linear(in_features, rank, **options), nn.Linear(rank, out_features, **options)
        for x in (self.a, self.b):
            x.weight = nn.Parameter(torch.empty_like(x.weight, device=device), requires_grad=False)
        self.b.bias = bias

    @classmethod
    def like(cls, layer: nn.Linear, rank: int, device: Any = None) -> LowRankLinear:
        """A layer in the place of another, with its bias. Its weights are not loaded."""
        weight = layer.weight
        return cls(layer.in_features, layer.out_features, rank, layer.bias, weight.dtype, device or weight.device)

    @property
    def weight(self) -> Tensor:
        """The shape and dtype of the weight, which some models look at."""
        return torch.empty(self.out_features, self.in_features, dtype=self.dtype, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}"


def low_rank_layers(model: nn.Module) -> dict[str, LowRankLinear]:
    """The layers of a model whose weight is a product, by path."""
    return {path: x for path, x in model.named_modules() if isinstance(x, LowRankLinear)}
