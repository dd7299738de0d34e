"""The Helmholtz equation  div grad u + k^2 u = 0  in the unit square, by a network (M. Raissi et al., J. Comput. Phys.
378, 686, 2019). On the boundary u = sin(k x), which is the solution inside too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tutti.science.em.bounds import check_positive, check_whole
from tutti.science.em.descent import check_rate, descend
from tutti.science.em.pinn.network import MultiScale, second


@dataclass(frozen=True)
class Helmholtz:
    """k: wave number, positive, per width of the square. weight: weight of the boundary in the loss."""

    k: float = 2.0
    weight: float = 100.0

    def __post_init__(self) -> None:
        check_positive("the Helmholtz equation", k=self.k, weight=self.weight)

    def residual(self, model: nn.Module, x: Tensor) -> Tensor:
        """div grad u + k^2 u at points (n, 2): (n, 1)."""
        return second(model, x, 0) + second(model, x, 1) + self.k**2 * model(x)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        edge = model(batch["boundary"]) - self.solution(batch["boundary"])
        return self.residual(model, batch["interior"]).square().mean() + self.weight * edge.square().mean()

    def solution(self, x: Tensor) -> Tensor:
        return torch.sin(self.k * x[:, :1])

    def batch(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Uniform points: `count` inside, a quarter as many on each edge."""
        edge = torch.rand(count // 4, 1, generator=generator)
        zero, one = torch.zeros_like(edge), torch.ones_like(edge)
        boundary = torch.cat([torch.cat(pair, 1) for pair in ((edge, zero), (edge, one), (zero, edge), (one, edge))])
        return {"interior": torch.rand(count, 2, generator=generator), "boundary": boundary}

    @torch.no_grad()
    def error(self, model: nn.Module, n: int = 101) -> float:
        """||u - solution|| / ||solution|| on n^2 points."""
        check_whole("the error", 2, n=n)
        line = torch.linspace(0, 1, n)
        x = torch.cartesian_prod(line, line)
        truth = self.solution(x)
        return float((model(x) - truth).norm() / truth.norm())

    def fit(self, steps: int = 1500, count: int = 256, rate: float = 2e-3, seed: int = 0,
            model: nn.Module | None = None,
            after: Callable[[int, float], None] | None = None) -> nn.Module:  # fmt: skip
        """Train a network (n, 2) -> (n, 1), with `count` new points inside, and as many on edges, in each step.

        model: trained instead of the default network. after: called with the step and its loss every 100 steps. Shows
        progress on a terminal. Raises ValueError if the training diverges.
        """
        check_whole("the training", steps=steps)
        check_whole("the training", 4, count=count)
        check_rate(rate)
        generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            model = model or MultiScale(2, 1, scales=(1.0, 2.0), layers=3, width=32)
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        descend(model, optimizer, schedule, lambda: self.batch(count, generator), self.loss, steps, after)
        return model
