"""Quantile regression Q-learning (Dabney et al., 2018): a network learns quantiles of the return.

The loss of quantile i at the level t_i = (i + 1/2) / n against target j is |t_i - 1[u < 0]| Huber(u), u = y_j - q_i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tutti.rl.algorithms.value.c51 import of_action
from tutti.rl.algorithms.value.dqn import DQN
from tutti.rl.networks.distributions import masked
from tutti.rl.networks.networks import mlp

Tree = dict[str, Any]


class QRDQN(DQN):
    """Options: `QRDQN.Config`."""

    @dataclass(frozen=True)
    class Config(DQN.Config):
        n_quantiles: int = 50

    def module(self) -> nn.Module:
        c = self.config
        actions = self.distribution.size
        return nn.Sequential(self.sighted(lambda size: mlp([size, *c.hidden, actions * c.n_quantiles], c.activation)),
                             nn.Unflatten(-1, (actions, c.n_quantiles)))  # fmt: skip

    def values(self, weights: Tensor, obs: Tensor) -> Tensor:
        return self.q(weights, obs).mean(-1)

    def loss(self, weights: Tensor, learner: Tree, batch: Tree, key: Tensor) -> tuple[Tensor, tuple[Tensor, Tree]]:
        present = of_action(self.q(weights, batch["obs"]), batch["action"])
        best = masked(self.values(learner["target"], batch["last"]), batch.get("last_mask")).argmax(-1)
        after = of_action(self.q(learner["target"], batch["last"]), best)
        target = batch["reward"].unsqueeze(-1) + batch["discount"].unsqueeze(-1) * after
        error = quantile_loss(present, target.detach())
        total = (batch["weight"] * error).mean()
        return total, (error.detach(), {"loss": total.detach(), "q": present.detach().mean()})


def quantile_loss(quantiles: Tensor, target: Tensor) -> Tensor:
    """Summed over quantiles (..., n), averaged over targets (..., m): (...)."""
    n = quantiles.shape[-1]
    levels = ((torch.arange(n) + 0.5) / n).unsqueeze(-1)
    u = target.unsqueeze(-2) - quantiles.unsqueeze(-1)
    huber = torch.where(u.abs() <= 1, 0.5 * u.square(), u.abs() - 0.5)
    return ((levels - (u.detach() < 0).float()).abs() * huber).mean(-1).sum(-1)
