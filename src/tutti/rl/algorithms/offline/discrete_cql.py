"""Conservative Q-learning for discrete actions (Kumar et al., 2020, arXiv 2006.04779, section 3.2).

Double Q-learning whose network also descends cql_alpha (log sum_a exp Q(s, a) - Q(s, a_data)): the values of actions
that the data do not take are pushed down. Targets are slow averages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tutti.rl.algorithms.families.offline import Offline
from tutti.rl.algorithms.value.dqn import DQN
from tutti.rl.core.agent import Number, Rate
from tutti.rl.core.descent import moved_towards
from tutti.rl.networks.distributions import masked

Tree = dict[str, Any]


class DiscreteCQL(Offline, DQN):
    """Options: `DiscreteCQL.Config`."""

    @dataclass(frozen=True)
    class Config(Offline.Config):
        """cql_alpha: weight of the conservative term."""

        learning_rate: Rate = 1e-3
        activation: str = "relu"
        max_grad_norm: Number = 10.0
        cql_alpha: Number = 1.0

    def sometimes_random(self, policy: Tree, q: Tensor, key: Tensor) -> Tensor:
        return q.argmax(-1)

    def update(self, learner: Tree, batch: Tree, key: Tensor) -> tuple[Tree, Tensor, Tree]:
        learner, error, metrics = super().update(learner, batch, key)
        slow = moved_towards(learner["target"], learner["weights"], self.config.tau)
        return {**learner, "target": slow}, error, metrics

    def loss(self, weights: Tensor, learner: Tree, batch: Tree, key: Tensor) -> tuple[Tensor, tuple[Tensor, Tree]]:
        total, (error, metrics) = super().loss(weights, learner, batch, key)
        gap = -self.distribution.log_prob(self.values(weights, batch["obs"]), batch["action"]).mean()
        return total + self.config.cql_alpha * gap, (error, {**metrics, "gap": gap.detach()})

    def next_value(self, weights: Tensor, learner: Tree, batch: Tree) -> Tensor:
        best = masked(self.values(weights, batch["last"]), batch.get("last_mask")).argmax(-1, keepdim=True)
        return self.values(learner["target"], batch["last"]).gather(-1, best).squeeze(-1)
