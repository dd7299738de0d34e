"""Implicit Q-learning (Kostrikov, Nair and Levine, 2021, arXiv 2110.06169).

V descends the expectile loss of u = min_i Q_i'(s, a) - V(s), |expectile - 1(u < 0)| u^2, whose minimum nears the best
action of the data for expectiles near 1. Critics descend (Q_i(s, a) - (r + gamma V(s')))^2. No action outside of the
data is ever valued. The policy is `AWAC`'s regression with the advantage u.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutti.rl.algorithms.offline.awac import AWAC
from tutti.rl.core.agent import Number
from tutti.rl.networks.networks import Network, mlp

Tree = dict[str, Any]


class IQL(AWAC):
    """Options: `IQL.Config`."""

    @dataclass(frozen=True)
    class Config(AWAC.Config):
        """expectile: 0.5 values the data's policy. temperature: 1 / beta of the paper."""

        expectile: Number = 0.7
        temperature: Number = 1 / 3

    def build(self) -> None:
        super().build()
        c = self.config
        self.v = Network(lambda: mlp([self.features.size, *c.hidden, 1], c.activation))

    def init(self, seed: int) -> Tree:
        value = self.v.init(seed + 2)
        return {**super().init(seed), "value": value, "value_adam": self.adam.init(value)}

    def update(self, learner: Tree, batch: Tree, key: Tensor) -> tuple[Tree, Tensor, Tree]:
        q = self.critic(learner["target_critic"], batch["obs"], batch["action"]).amin(0)

        def loss(weights: Tensor) -> tuple[Tensor, Tensor]:
            advantage = q - self.v(weights, batch["obs"]).squeeze(-1)
            return expectile_loss(advantage, self.config.expectile).mean(), advantage.detach()

        gradient, advantage = torch.func.grad(loss, has_aux=True)(learner["value"])
        after = self.v(learner["value"], batch["last"]).squeeze(-1)
        value, adam = self.adam.step(learner["value"], gradient, learner["value_adam"], self.rate(learner))
        learner, error, metrics = self.critic_step({**learner, "value": value, "value_adam": adam}, batch, after)
        learner, more = self.regression(learner, batch, advantage)
        return learner, error, {**metrics, **more, "advantage": advantage.mean()}


def expectile_loss(u: Tensor, expectile: Number) -> Tensor:
    """Squares that weigh `expectile` where u is positive, and 1 - expectile where it is negative."""
    return torch.where(u < 0, 1 - expectile, expectile) * u.square()
