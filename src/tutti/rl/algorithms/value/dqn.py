"""Deep Q-learning (Mnih et al., 2015), and what its variants share.

Each batch descends the Huber loss of Q(s, a) - (r + gamma max_a' Q'(s', a')), where Q' is a copy of Q from some steps
before. Actions are random with a probability that falls linearly, and else those of the largest Q.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Tensor, nn

from tutti.rl.algorithms.families.off_policy import OffPolicy
from tutti.rl.core import keys
from tutti.rl.core.agent import Number, Rate
from tutti.rl.core.descent import Adam, moved_towards
from tutti.rl.networks.distributions import masked
from tutti.rl.networks.networks import Network, mlp

Tree = dict[str, Any]


class DQN(OffPolicy):
    """Options: `DQN.Config`."""

    @dataclass(frozen=True)
    class Config(OffPolicy.Config):
        """exploration_fraction: the share of learning in which the probability of random actions falls from
        exploration_initial_eps to exploration_final_eps. target_update_interval: steps between copies of the target."""

        n_steps: int = 4
        learning_rate: Rate = 1e-4
        batch_size: int = 32
        gradient_steps: int = 1
        hidden: tuple[int, ...] = (64, 64)
        activation: str = "relu"
        exploration_fraction: float = 0.1
        exploration_initial_eps: Number = 1.0
        exploration_final_eps: Number = 0.05
        target_update_interval: int = 10_000
        tau: Number = 1.0
        max_grad_norm: Number = 10.0

    actions = (spaces.Discrete,)
    multi_agent = False
    sees = True
    cnn_hidden = ()

    def build(self) -> None:
        self.q = Network(self.module)
        self.adam = Adam(clip=self.config.max_grad_norm)

    def module(self) -> nn.Module:
        """The network of action values: features (..., size) to (..., actions)."""
        c = self.config
        return self.sighted(lambda size: mlp([size, *c.hidden, self.distribution.size], c.activation))

    def init(self, seed: int) -> Tree:
        weights = self.q.init(seed)
        return {"weights": weights, "target": weights.clone(), "adam": self.adam.init(weights)}

    def policy(self, learner: Tree) -> Tree:
        return {"weights": learner["weights"]}

    def values(self, weights: Tensor, obs: Tensor) -> Tensor:
        """Action values (..., actions)."""
        return self.q(weights, obs)

    def act(self, policy: Tree, seen: Tree, carry: Tree, key: Tensor, explore: bool) -> tuple[Tensor, Tree, Tree]:
        q = masked(self.values(policy["weights"], seen["obs"]), seen.get("mask"))
        return (self.sometimes_random(policy, q, key) if explore else q.argmax(-1)), {}, carry

    def sometimes_random(self, policy: Tree, q: Tensor, key: Tensor) -> Tensor:
        """The best action, or with probability epsilon any possible one."""
        c = self.config
        of_choice, of_action = keys.split(key)
        share = (policy["progress"] / c.exploration_fraction).clamp(max=1.0)
        epsilon = c.exploration_initial_eps + share * (c.exploration_final_eps - c.exploration_initial_eps)
        some = keys.categorical(of_action, torch.where(q > -1e8, 0.0, q))
        return torch.where(keys.uniform(of_choice, some.shape) < epsilon, some, q.argmax(-1))

    def before(self, learner: Tree, steps: Tensor) -> Tree:
        c = self.config
        each = c.n_steps * c.n_envs
        due = steps // c.target_update_interval > (steps - each) // c.target_update_interval
        moved = moved_towards(learner["target"], learner["weights"], c.tau)
        return {**learner, "target": torch.where(due, moved, learner["target"])}

    def update(self, learner: Tree, batch: Tree, key: Tensor) -> tuple[Tree, Tensor, Tree]:
        gradient, (error, metrics) = torch.func.grad(self.loss, has_aux=True)(learner["weights"], learner, batch, key)
        weights, adam = self.adam.step(learner["weights"], gradient, learner["adam"], self.rate(learner))
        return {**learner, "weights": weights, "adam": adam}, error, metrics

    def loss(self, weights: Tensor, learner: Tree, batch: Tree, key: Tensor) -> tuple[Tensor, tuple[Tensor, Tree]]:
        """(loss, (errors (count,), what to report))."""
        q = self.values(weights, batch["obs"]).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
        target = batch["reward"] + batch["discount"] * self.next_value(weights, learner, batch)
        loss = F.smooth_l1_loss(q, target.detach(), reduction="none")
        total = (batch["weight"] * loss).mean()
        return total, ((q - target).detach(), {"loss": total.detach(), "q": q.detach().mean()})

    def next_value(self, weights: Tensor, learner: Tree, batch: Tree) -> Tensor:
        """The value of the observation after the step, (count,)."""
        return masked(self.values(learner["target"], batch["last"]), batch.get("last_mask")).amax(-1)
