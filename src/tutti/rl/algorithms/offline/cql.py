"""Conservative Q-learning (Kumar et al., 2020, arXiv 2006.04779) for continuous actions: `DiscreteCQL` for others.

SAC whose critics also descend

    cql_alpha E[log integral exp Q(s, a) da - Q(s, a_data)]

so that actions outside of the data are not overvalued. The integral is estimated from `n_actions` uniform actions, and
as many of the policy at s and at s', each weighted by one over its density (CQL(H), appendix F).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutti.rl.algorithms.continuous.sac import SAC
from tutti.rl.algorithms.families.offline import Offline
from tutti.rl.core import keys
from tutti.rl.core.agent import Number

Tree = dict[str, Any]


class CQL(Offline, SAC):
    """Options: `CQL.Config`."""

    @dataclass(frozen=True)
    class Config(Offline.Config):
        """cql_alpha: weight of the conservative term. n_actions: number of actions of each kind, to estimate the
        integral. Others: those of SAC."""

        hidden: tuple[int, ...] = (256, 256)
        activation: str = "relu"
        ent_coef: Number | None = None
        target_entropy: Number | None = None
        cql_alpha: Number = 5.0
        n_actions: int = 10

    def critic_loss(self, weights: Tensor, learner: Tree, batch: Tree, alpha: Any, key: Tensor):
        of_bellman, of_gap = keys.split(key)
        total, (errors, metrics) = super().critic_loss(weights, learner, batch, alpha, of_bellman)
        gap = self.gap(weights, learner, batch, of_gap)
        return total + self.config.cql_alpha * gap.mean(-1).sum(), (errors, metrics)

    def gap(self, weights: Tensor, learner: Tree, batch: Tree, key: Tensor) -> Tensor:
        """Excess of the values of all actions over those of the data, (critics, count)."""
        action, log_density = self.proposals(learner["actor"], batch, key)
        obs = batch["obs"].expand(len(action), *batch["obs"].shape)
        q = self.critic(weights, obs.flatten(0, 1), action.flatten(0, 1)).squeeze(-1)
        q = q.unflatten(-1, (len(action), -1))
        integral = (q - log_density).logsumexp(-2) - math.log(len(action))
        return integral - self.critic(weights, batch["obs"], batch["action"]).squeeze(-1)

    def proposals(self, actor: Tensor, batch: Tree, key: Tensor) -> tuple[Tensor, Tensor]:
        """Actions (3 n_actions, count, *shape), and logs of the densities that they were drawn with."""
        n, d, count = self.config.n_actions, self.distribution, batch["obs"].shape[0]
        of_uniform, now, later = keys.split(key, 3)
        uniform = keys.uniform(of_uniform, (n, count, *d.shape), -1.0, 1.0)
        drawn = [(uniform, torch.full((n, count), -d.width * math.log(2)))]
        for name, k in (("obs", now), ("last", later)):
            outputs = self.pi(actor, batch[name])
            drawn.append(d.sample_with_log_prob(outputs.expand(n, *outputs.shape), k))
        action, log_density = zip(*drawn, strict=True)
        return torch.cat(action).detach(), torch.cat(log_density).detach()
