"""Numbers of any scale as distributions over bins (Hafner et al., 2023, arXiv 2301.04104).

`symlog` compresses both signs: sign(x) log(1 + |x|). A number is the pair of bins around its symlog, weighted by
closeness; a network that predicts a distribution over bins is trained by cross-entropy, whatever the numbers' scale.
"""

from __future__ import annotations

import torch
from torch import Tensor


def symlog(x: Tensor) -> Tensor:
    return x.sign() * x.abs().log1p()


def symexp(x: Tensor) -> Tensor:
    """The inverse of `symlog`."""
    return x.sign() * x.abs().expm1()


class TwoHot:
    """`count` bins from -reach to reach, in units of symlog. count is odd, so that one of them is 0."""

    def __init__(self, count: int = 41, reach: float = 10.0):
        if count % 2 == 0:
            raise ValueError(f"there are {count} bins; use an odd number, so that one of them is at 0")
        self.count, self.reach = count, reach
        self.bins = torch.linspace(-reach, reach, count)

    def encode(self, x: Tensor) -> Tensor:
        """Weights of bins (..., count), of numbers (...). Numbers beyond the last bins are moved there."""
        place = (symlog(x).clamp(-self.reach, self.reach) + self.reach) / (2 * self.reach) * (self.count - 1)
        return (1 - (place.unsqueeze(-1) - torch.arange(self.count)).abs()).clamp(min=0.0)

    def mean(self, logits: Tensor) -> Tensor:
        """The number that a distribution stands for, (...)."""
        return symexp((logits.softmax(-1) * self.bins).sum(-1))

    def loss(self, logits: Tensor, x: Tensor) -> Tensor:
        """Cross-entropies, (...)."""
        return -(self.encode(x) * logits.log_softmax(-1)).sum(-1)
