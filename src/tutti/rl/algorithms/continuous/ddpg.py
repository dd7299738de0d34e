"""Deep deterministic policy gradient (Lillicrap et al., 2016), and what its successors share.

The critic descends (Q(s, a) - (r + gamma Q'(s', pi'(s'))))^2, the actor -Q(s, pi(s)). Targets are slow averages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from tutti.rl.algorithms.families.off_policy import OffPolicy
from tutti.rl.core import keys
from tutti.rl.core.agent import Number, Rate
from tutti.rl.core.descent import Adam, moved_towards
from tutti.rl.networks.networks import Ensemble, Network, mlp

Tree = dict[str, Any]


class DDPG(OffPolicy):
    """Options: `DDPG.Config`."""

    @dataclass(frozen=True)
    class Config(OffPolicy.Config):
        """noise: standard deviation of exploration, as a part of half of the range of actions."""

        learning_rate: Rate = 1e-3
        hidden: tuple[int, ...] = (256, 256)
        activation: str = "relu"
        noise: Number = 0.1

    actions = (spaces.Box,)
    multi_agent = False
    sees = True
    squashed = True  # actions of the algorithm are in [-1, 1]
    critics = 1

    def build(self) -> None:
        c, size, width = self.config, self.features.size, self.distribution.width
        self.pi = Network(lambda: nn.Sequential(self.sighted(lambda n: mlp([n, *c.hidden, width], c.activation)),
                                                nn.Tanh()))  # fmt: skip
        self.q = Ensemble(lambda: self.sighted(lambda n: mlp([n, *c.hidden, 1], c.activation), size + width),
                          self.critics)  # fmt: skip
        self.adam = Adam()

    def init(self, seed: int) -> Tree:
        actor, critic = self.pi.init(seed), self.q.init(seed + 1)
        return {"actor": actor, "critic": critic, "target_actor": actor.clone(), "target_critic": critic.clone(),
                "actor_adam": self.adam.init(actor), "critic_adam": self.adam.init(critic)}  # fmt: skip

    def policy(self, learner: Tree) -> Tree:
        return {"actor": learner["actor"]}

    def act(self, policy: Tree, seen: Tree, carry: Tree, key: Tensor, explore: bool) -> tuple[Tensor, Tree, Tree]:
        action = self.pi(policy["actor"], seen["obs"])
        if explore:
            action = (action + self.config.noise * keys.normal(key, action.shape)).clamp(-1, 1)
        return action.unflatten(-1, self.distribution.shape), {}, carry

    def critic(self, weights: Tensor, obs: Tensor, action: Tensor) -> Tensor:
        """Action values of all critics, (critics, count)."""
        return self.q(weights, torch.cat([obs, action.reshape(*obs.shape[:-1], -1)], -1)).squeeze(-1)

    def update(self, learner: Tree, batch: Tree, key: Tensor) -> tuple[Tree, Tensor, Tree]:
        learner, error, metrics = self.critic_step(learner, batch, key)
        return self.actor_step(learner, batch), error, metrics

    def critic_step(self, learner: Tree, batch: Tree, key: Tensor) -> tuple[Tree, Tensor, Tree]:
        target = (batch["reward"] + batch["discount"] * self.next_value(learner, batch, key)).detach()

        def loss(weights: Tensor) -> tuple[Tensor, tuple[Tensor, Tree]]:
            q = self.critic(weights, batch["obs"], batch["action"])
            errors = q - target
            total = (batch["weight"] * errors.square()).mean(-1).sum()
            return total, (errors.detach().mean(0), {"critic_loss": total.detach(), "q": q.detach().mean()})

        gradient, (error, metrics) = torch.func.grad(loss, has_aux=True)(learner["critic"])
        critic, adam = self.adam.step(learner["critic"], gradient, learner["critic_adam"], self.rate(learner))
        return {**learner, "critic": critic, "critic_adam": adam}, error, metrics

    def next_value(self, learner: Tree, batch: Tree, key: Tensor) -> Tensor:
        """The value of the observation after the step, (count,)."""
        action = self.pi(learner["target_actor"], batch["last"])
        return self.critic(learner["target_critic"], batch["last"], action).amin(0)

    def actor_step(self, learner: Tree, batch: Tree) -> Tree:
        """Move the actor, and the slow averages."""
        gradient = torch.func.grad(self.actor_loss)(learner["actor"], learner, batch)
        actor, adam = self.adam.step(learner["actor"], gradient, learner["actor_adam"], self.rate(learner))
        tau = self.config.tau
        return {**learner, "actor": actor, "actor_adam": adam,
                "target_actor": moved_towards(learner["target_actor"], actor, tau),
                "target_critic": moved_towards(learner["target_critic"], learner["critic"], tau)}  # fmt: skip

    def actor_loss(self, weights: Tensor, learner: Tree, batch: Tree) -> Tensor:
        """Loss of the actor."""
        return -self.critic(learner["critic"], batch["obs"], self.pi(weights, batch["obs"]))[0].mean()
