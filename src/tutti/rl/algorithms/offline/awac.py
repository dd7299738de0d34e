"""Advantage-weighted actor-critic (Nair et al., 2020, arXiv 2006.09359), and its regression of a policy.

With the advantage A(s, a) = min_i Q_i(s, a) - min_i Q_i(s, a_pi), a_pi ~ pi(.|s), the policy descends

    -E[exp(A / temperature) log pi(a|s)]

over the actions in the data only, so that critics are hardly asked about others. The weight is at most `max_weight`.
Critics descend (Q_i(s, a) - (r + gamma min_j Q_j'(s', a')))^2 with a' ~ pi(.|s').
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from tutti.rl.algorithms.families.offline import Offline
from tutti.rl.core import keys
from tutti.rl.core.agent import Number
from tutti.rl.core.descent import Adam, moved_towards
from tutti.rl.networks.networks import Ensemble, Network, mlp

Tree = dict[str, Any]


class AWAC(Offline):
    """Options: `AWAC.Config`."""

    @dataclass(frozen=True)
    class Config(Offline.Config):
        """temperature: what advantages are divided by, in units of returns. max_weight: largest weight of a step."""

        hidden: tuple[int, ...] = (256, 256)
        activation: str = "relu"
        normalize_obs: bool = True
        temperature: Number = 1.0
        max_weight: Number = 100.0

    actions = (spaces.Box,)
    squashed = True

    def build(self) -> None:
        c, size, width = self.config, self.features.size, self.distribution.width
        self.pi = Network(lambda: Policy(size, width, c))
        self.q = Ensemble(lambda: mlp([size + width, *c.hidden, 1], c.activation), 2)
        self.adam = Adam()

    def init(self, seed: int) -> Tree:
        actor, critic = self.pi.init(seed), self.q.init(seed + 1)
        return {"actor": actor, "critic": critic, "target_critic": critic.clone(),
                "actor_adam": self.adam.init(actor), "critic_adam": self.adam.init(critic)}  # fmt: skip

    def policy(self, learner: Tree) -> Tree:
        return {"actor": learner["actor"]}

    def act(self, policy: Tree, seen: Tree, carry: Tree, key: Tensor, explore: bool) -> tuple[Tensor, Tree, Tree]:
        action = self.drawn(policy["actor"], seen["obs"], key) if explore else self.pi(policy["actor"], seen["obs"])[0]
        return action.unflatten(-1, self.distribution.shape), {}, carry

    def drawn(self, weights: Tensor, obs: Tensor, key: Tensor) -> Tensor:
        """Actions of the policy, (count, width), clipped to [-1, 1]."""
        mean, log_std = self.pi(weights, obs)
        return (mean + log_std.exp() * keys.normal(key, mean.shape)).clamp(-1, 1)

    def critic(self, weights: Tensor, obs: Tensor, action: Tensor) -> Tensor:
        """Action values of both critics, (2, count)."""
        return self.q(weights, torch.cat([obs, action.flatten(1)], -1)).squeeze(-1)

    def update(self, learner: Tree, batch: Tree, key: Tensor) -> tuple[Tree, Tensor, Tree]:
        of_critic, of_actor = keys.split(key)
        after = self.drawn(learner["actor"], batch["last"], of_critic)
        value = self.critic(learner["target_critic"], batch["last"], after).amin(0)
        learner, error, metrics = self.critic_step(learner, batch, value)
        own = self.drawn(learner["actor"], batch["obs"], of_actor)
        advantage = self.critic(learner["critic"], batch["obs"], batch["action"]).amin(0)
        advantage = advantage - self.critic(learner["critic"], batch["obs"], own).amin(0)
        learner, more = self.regression(learner, batch, advantage)
        return learner, error, {**metrics, **more}

    def critic_step(self, learner: Tree, batch: Tree, after: Tensor) -> tuple[Tree, Tensor, Tree]:
        """Update the critics and their target. after: the value of `last`, (count,)."""
        target = (batch["reward"] + batch["discount"] * after).detach()

        def loss(weights: Tensor) -> tuple[Tensor, tuple[Tensor, Tree]]:
            q = self.critic(weights, batch["obs"], batch["action"])
            total = (q - target).square().mean(-1).sum()
            return total, ((q - target).detach().mean(0), {"critic_loss": total.detach(), "q": q.detach().mean()})

        gradient, (error, metrics) = torch.func.grad(loss, has_aux=True)(learner["critic"])
        critic, adam = self.adam.step(learner["critic"], gradient, learner["critic_adam"], self.rate(learner))
        slow = moved_towards(learner["target_critic"], critic, self.config.tau)
        return {**learner, "critic": critic, "critic_adam": adam, "target_critic": slow}, error, metrics

    def regression(self, learner: Tree, batch: Tree, advantage: Tensor) -> tuple[Tree, Tree]:
        """Update the policy towards the actions of the data, weighted by their advantages (count,)."""
        c = self.config
        weight = (advantage / c.temperature).exp().clamp(max=c.max_weight)

        def loss(weights: Tensor) -> Tensor:
            return -(weight * self.log_prob(weights, batch["obs"], batch["action"].flatten(1))).mean()

        gradient, actor_loss = torch.func.grad_and_value(loss)(learner["actor"])
        actor, adam = self.adam.step(learner["actor"], gradient, learner["actor_adam"], self.rate(learner))
        return {**learner, "actor": actor, "actor_adam": adam}, {"actor_loss": actor_loss, "weight": weight.mean()}

    def log_prob(self, weights: Tensor, obs: Tensor, action: Tensor) -> Tensor:
        """Log-probabilities of actions, without their clipping, (count,)."""
        mean, log_std = self.pi(weights, obs)
        off = (action - mean) * (-log_std).exp()
        return (-0.5 * off.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


class Policy(nn.Module):
    """Normal actions: (means in (-1, 1), log standard deviations that do not depend on the observation)."""

    def __init__(self, size: int, width: int, config: Any):
        super().__init__()
        self.mean = mlp([size, *config.hidden, width], config.activation)
        self.log_std = nn.Parameter(torch.full((width,), -1.0))

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.mean(obs).tanh()
        return mean, self.log_std.clamp(-5.0, 2.0).expand_as(mean)
