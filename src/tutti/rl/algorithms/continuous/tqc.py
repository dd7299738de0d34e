"""Truncated quantile critics (Kuznetsov et al., 2020): SAC with quantiles of returns, of which the largest are dropped.

Each of the critics predicts `n_quantiles`. The target is made of the smallest of all their quantiles together, without
`drop` for each critic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tutti.rl.algorithms.continuous.sac import SAC
from tutti.rl.algorithms.value.qr_dqn import quantile_loss

Tree = dict[str, Any]


class TQC(SAC):
    """Options: `TQC.Config`."""

    @dataclass(frozen=True)
    class Config(SAC.Config):
        """drop: largest quantiles of each critic that the target leaves out."""

        n_quantiles: int = 25
        n_critics: int = 2
        drop: int = 2

    def build(self) -> None:
        self.outputs, self.critics = self.config.n_quantiles, self.config.n_critics
        super().build()

    def critic_loss(self, weights: Tensor, learner: Tree, batch: Tree, alpha: Any, key: Tensor):
        c = self.config
        action, log_prob = self.distribution.sample_with_log_prob(self.pi(learner["actor"], batch["last"]), key)
        after = self.critic(learner["target_critic"], batch["last"], action).movedim(0, -2).flatten(-2).sort(-1).values
        after = after[..., : c.n_critics * (c.n_quantiles - c.drop)] - (alpha * log_prob).unsqueeze(-1)
        target = (batch["reward"].unsqueeze(-1) + batch["discount"].unsqueeze(-1) * after).detach()
        quantiles = self.critic(weights, batch["obs"], batch["action"])
        errors = quantile_loss(quantiles, target.expand(c.n_critics, *target.shape)) / c.n_quantiles
        total = (batch["weight"] * errors).mean()
        return total, (errors.detach().mean(0), total.detach())

    def value(self, critic: Tensor, obs: Tensor, action: Tensor) -> Tensor:
        return self.critic(critic, obs, action).mean(-1).mean(0)
