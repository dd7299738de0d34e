"""Value decomposition networks (Sunehag et al., 2018, arXiv 1706.05296), and what QMIX shares with them.

The value of a joint action is the sum of what each agent's network gives for its own observation and action,

    Q(s, a) = sum_i Q_i(o_i, a_i)

so that the best joint action consists of the best action of each agent. It is learned like a single agent's, with
double Q-learning, from the mean reward of the team. All agents share the weights of one network. Agents that have left
the episode have the value 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tutti.rl import teams
from tutti.rl.algorithms.value.dqn import DQN
from tutti.rl.core.agent import Rate
from tutti.rl.core.env import over
from tutti.rl.networks.distributions import masked
from tutti.rl.networks.networks import mlp

Tree = dict[str, Any]


class VDN(DQN):
    """Options: `VDN.Config`."""

    @dataclass(frozen=True)
    class Config(DQN.Config):
        """agent_ids: append the agent's index, one-hot, to observations."""

        n_envs: int = 8
        n_steps: int = 1
        learning_rate: Rate = 5e-4
        batch_size: int = 128
        target_update_interval: int = 1_000
        agent_ids: bool = True

    multi_agent = True
    unused = (*DQN.unused, "hindsight")
    sees = False

    def build(self) -> None:
        self.count = teams.several(self)
        super().build()

    def module(self) -> nn.Module:
        c = self.config
        size = self.features.size + self.count * c.agent_ids
        return mlp([size, *c.hidden, self.distribution.size], c.activation)

    def policy(self, learner: Tree) -> Tree:
        return {"weights": learner["weights"][: self.q.size]}

    def values(self, weights: Tensor, obs: Tensor) -> Tensor:
        """Action values of each agent, (..., agents, actions)."""
        return self.q(weights[: self.q.size], teams.with_ids(obs) if self.config.agent_ids else obs)

    def mix(self, weights: Tensor, values: Tensor, seen: Tensor) -> Tensor:
        """The value of the joint action, (...), of values of agents (..., agents) and `teams.seen_by_all`."""
        return values.sum(-1)

    def loss(self, weights: Tensor, learner: Tree, batch: Tree, key: Tensor) -> tuple[Tensor, tuple[Tensor, Tree]]:
        chosen = self.values(weights, batch["obs"]).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
        if "valid" in batch:
            chosen = torch.where(batch["valid"], chosen, 0.0)
        q = self.mix(weights, chosen, teams.seen_by_all(batch))
        target = batch["reward"].mean(-1) + self.discount(batch) * self.next_value(weights, learner, batch)
        loss = F.smooth_l1_loss(q, target.detach(), reduction="none")
        total = (batch["weight"] * loss).mean()
        return total, ((q - target).detach(), {"loss": total.detach(), "q": q.detach().mean()})

    def stays(self, batch: Tree) -> Tensor:
        """Whose value counts after the step: agents that take part then, and have not terminated."""
        return batch["last_valid"] & ~over(batch["terminated"], batch["last_valid"])

    def discount(self, batch: Tree) -> Tensor:
        """Discount of the value of the joint action after the step, (count,): 0 where no agent goes on."""
        if "valid" not in batch:
            return batch["discount"][..., 0]
        return torch.where(self.stays(batch), batch["discount"], 0.0).amax(-1)

    def next_value(self, weights: Tensor, learner: Tree, batch: Tree) -> Tensor:
        """The target's value of the actions that are now the best, (count,)."""
        best = masked(self.values(weights, batch["last"]), batch.get("last_mask")).argmax(-1, keepdim=True)
        values = self.values(learner["target"], batch["last"]).gather(-1, best.detach()).squeeze(-1)
        if "valid" in batch:
            values = torch.where(self.stays(batch), values, 0.0)
        return self.mix(learner["target"], values, teams.seen_by_all(batch, "last_"))
