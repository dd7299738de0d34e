"""IMPALA (Espeholt et al., 2018): an actor-critic that corrects for actors whose policy is older than the learner's.

Targets and advantages are those of V-trace, with the ratios of the learner's policy to that which acted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutti.rl.actor_critic import ActorCritic
from tutti.rl.agent import Number, Rate
from tutti.rl.descent import RMSProp
from tutti.rl.returns import vtrace

Tree = dict[str, Any]


class IMPALA(ActorCritic):
    """Options: `IMPALA.Config`."""

    @dataclass(frozen=True)
    class Config(ActorCritic.Config):
        """rho, c: upper bounds of the ratios in V-trace. lam: of its traces."""

        n_steps: int = 20
        learning_rate: Rate = 6e-4
        ent_coef: Number = 0.01
        max_grad_norm: Number = 40.0
        rho: float = 1.0
        c: float = 1.0
        lam: Number = 1.0

    def build(self) -> None:
        super().build()
        self.adam = RMSProp(eps=0.01, inside=True, clip=self.config.max_grad_norm)

    def update(self, learner: Tree, chunk: Tree, key: Tensor) -> tuple[Tree, Tree]:
        gradient, told = torch.func.grad(self.loss, has_aux=True)(learner["weights"], learner, chunk)
        weights, state = self.adam.step(learner["weights"], gradient, learner["adam"], self.rate(learner))
        return {**learner, "weights": weights, "adam": state}, told

    def loss(self, weights: Tensor, learner: Tree, chunk: Tree) -> tuple[Tensor, Tree]:
        c = self.config
        outputs, value = self.network(weights, {**self.inputs(chunk)})
        log_prob = self.distribution.log_prob(outputs, chunk["action"])
        _, after, terminated, done = self.values(learner, chunk)
        ratio = (log_prob - chunk["log_prob"]).exp().detach()
        target, advantage = vtrace(ratio, chunk["reward"], value.detach(), after, terminated, done, c.gamma, c.lam,
                                   c.rho, c.c)  # fmt: skip
        policy_loss = -(log_prob * advantage.detach()).mean()
        value_loss = (value - target.detach()).square().mean()
        entropy = self.distribution.entropy(outputs).mean()
        told = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy, "ratio": ratio.mean()}
        return policy_loss + c.vf_coef * value_loss - c.ent_coef * entropy, {k: x.detach() for k, x in told.items()}
