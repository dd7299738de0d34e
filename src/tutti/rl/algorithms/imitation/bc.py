"""Behavioral cloning (Pomerleau, 1989): supervised learning of the actions in the data.

Discrete actions descend -log pi(a|s), continuous ones (pi(s) - a)^2 with pi(s) in (-1, 1), which is their
log-likelihood under a fixed variance. The policy is at best as good as the one that made the data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutti.rl.algorithms.families.offline import Offline
from tutti.rl.core.agent import Agent, Rate
from tutti.rl.core.descent import Adam
from tutti.rl.networks.distributions import Box, masked
from tutti.rl.networks.networks import Network, mlp

Tree = dict[str, Any]


class Cloning(Agent):
    """A policy that is fitted to actions: what `BC` and `DAgger` share."""

    squashed = True

    def build(self) -> None:
        c, d = self.config, self.distribution
        size = d.width if isinstance(d, Box) else d.size
        self.net = Network(lambda: mlp([self.features.size, *c.hidden, size], c.activation))
        self.adam = Adam(decay=c.decay)

    def init(self, seed: int) -> Tree:
        weights = self.net.init(seed)
        return {"weights": weights, "adam": self.adam.init(weights)}

    def policy(self, learner: Tree) -> Tree:
        return {"weights": learner["weights"]}

    def act(self, policy: Tree, seen: Tree, carry: Tree, key: Tensor, explore: bool) -> tuple[Tensor, Tree, Tree]:
        outputs, d = self.net(policy["weights"], seen["obs"]), self.distribution
        if isinstance(d, Box):
            return outputs.tanh().unflatten(-1, d.shape), {}, carry
        outputs = masked(outputs, seen.get("mask"))
        return (d.sample(outputs, key) if explore else d.mode(outputs)), {}, carry

    def losses(self, weights: Tensor, batch: Tree) -> Tensor:
        """The loss of each step, (count,)."""
        outputs, d = self.net(weights, batch["obs"]), self.distribution
        if isinstance(d, Box):
            return (outputs.tanh() - batch["action"].flatten(1)).square().mean(-1)
        return -d.log_prob(outputs, batch["action"])

    def update(self, learner: Tree, batch: Tree, key: Tensor) -> tuple[Tree, Tensor, Tree]:
        def loss(weights: Tensor) -> tuple[Tensor, Tensor]:
            each = self.losses(weights, batch)
            return (batch["weight"] * each).mean(), each.detach()

        gradient, each = torch.func.grad(loss, has_aux=True)(learner["weights"])
        weights, adam = self.adam.step(learner["weights"], gradient, learner["adam"], self.rate(learner))
        return {**learner, "weights": weights, "adam": adam}, each, {"loss": each.mean()}


class BC(Cloning, Offline):
    """Options: `BC.Config`."""

    @dataclass(frozen=True)
    class Config(Offline.Config):
        """decay: weight decay."""

        learning_rate: Rate = 1e-3
        activation: str = "relu"
        decay: float = 0.0

    unused = (*Offline.unused, "gamma", "tau")
