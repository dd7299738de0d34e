"""Categorical Q-learning (Bellemare, Dabney and Munos, 2017): a network learns the distribution of returns.

Returns have 51 possible values z_i. The target distribution of r + gamma z is projected onto them, and the loss is the
cross entropy between it and the present one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tutti.rl.algorithms.value.dqn import DQN
from tutti.rl.core import keys
from tutti.rl.networks.distributions import masked
from tutti.rl.networks.networks import mlp

Tree = dict[str, Any]


class C51(DQN):
    """Options: `C51.Config`."""

    @dataclass(frozen=True)
    class Config(DQN.Config):
        """atoms: number of values, from v_min to v_max."""

        atoms: int = 51
        v_min: float = 0.0
        v_max: float = 100.0

    def module(self) -> nn.Module:
        c = self.config
        actions = self.distribution.size
        return nn.Sequential(self.sighted(lambda size: mlp([size, *c.hidden, actions * c.atoms], c.activation)),
                             nn.Unflatten(-1, (actions, c.atoms)))  # fmt: skip

    @property
    def support(self) -> Tensor:
        c = self.config
        return torch.linspace(c.v_min, c.v_max, c.atoms)

    def logits(self, weights: Tensor, obs: Tensor, key: Tensor | None) -> Tensor:
        """Unnormalized log-probabilities (..., actions, atoms). key: key of the noise, for networks that have some."""
        return self.q(weights, obs)

    def values(self, weights: Tensor, obs: Tensor, key: Tensor | None = None) -> Tensor:
        return (self.logits(weights, obs, key).softmax(-1) * self.support).sum(-1)

    def loss(self, weights: Tensor, learner: Tree, batch: Tree, key: Tensor) -> tuple[Tensor, tuple[Tensor, Tree]]:
        of_present, of_target = keys.split(key)
        log = of_action(self.logits(weights, batch["obs"], of_present), batch["action"]).log_softmax(-1)
        target = self.projected(weights, learner, batch, of_target)
        error = -(target * log).sum(-1)
        total = (batch["weight"] * error).mean()
        q = (log.exp() * self.support).sum(-1)
        return total, (error.detach(), {"loss": total.detach(), "q": q.detach().mean()})

    def projected(self, weights: Tensor, learner: Tree, batch: Tree, key: Tensor) -> Tensor:
        """The distribution of r + gamma z(s', a*), on the atoms: (count, atoms)."""
        c = self.config
        of_choice, of_value = keys.split(key)
        q = self.values(self.choosing(weights, learner), batch["last"], of_choice)
        best = masked(q, batch.get("last_mask")).argmax(-1)
        chance = of_action(self.logits(learner["target"], batch["last"], of_value), best).softmax(-1)
        moved = (batch["reward"].unsqueeze(-1) + batch["discount"].unsqueeze(-1) * self.support).clamp(c.v_min, c.v_max)
        place = (moved - c.v_min) / ((c.v_max - c.v_min) / (c.atoms - 1))
        share = (1 - (place.unsqueeze(-1) - torch.arange(c.atoms)).abs()).clamp(min=0)  # (count, atoms, atoms)
        return (chance.unsqueeze(-1) * share).sum(-2).detach()

    def choosing(self, weights: Tensor, learner: Tree) -> Tensor:
        """The weights by which the next action is chosen."""
        return learner["target"]


def of_action(x: Tensor, action: Tensor) -> Tensor:
    """The outputs (count, outputs) of the actions (count,), of (count, actions, outputs)."""
    return x.gather(-2, action.view(-1, 1, 1).expand(-1, 1, x.shape[-1])).squeeze(-2)
