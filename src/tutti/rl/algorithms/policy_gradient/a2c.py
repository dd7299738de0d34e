"""Advantage actor-critic (Mnih et al., 2016), with all environments in step.

One gradient step on the whole rollout: -E[log pi(a|s) A] + vf_coef E[(V - R)^2] - ent_coef E[H].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutti.rl.algorithms.families.actor_critic import ActorCritic, flat_rows
from tutti.rl.core.agent import Number, Rate
from tutti.rl.core.descent import RMSProp
from tutti.rl.core.returns import gae, mean_over

Tree = dict[str, Any]


class A2C(ActorCritic):
    """Options: `A2C.Config`."""

    @dataclass(frozen=True)
    class Config(ActorCritic.Config):
        n_steps: int = 5
        learning_rate: Rate = 7e-4
        gae_lambda: Number = 1.0

    def build(self) -> None:
        super().build()
        self.adam = RMSProp(eps=1e-5, clip=self.config.max_grad_norm)

    def update(self, learner: Tree, chunk: Tree, key: Tensor) -> tuple[Tree, Tree]:
        c = self.config
        value, after, terminated, done = self.values(learner, chunk)
        advantage = gae(chunk["reward"], value, after, terminated, done, c.gamma, c.gae_lambda)
        rows = flat_rows({**self.inputs(chunk), "action": chunk["action"], "advantage": advantage,
                          "target": advantage + value}, chunk["reward"].ndim)  # fmt: skip
        gradient, metrics = torch.func.grad(self.loss, has_aux=True)(learner["weights"], rows)
        weights, state = self.adam.step(learner["weights"], gradient, learner["adam"], self.rate(learner))
        return {**learner, "weights": weights, "adam": state}, metrics

    def loss(self, weights: Tensor, rows: Tree) -> tuple[Tensor, Tree]:
        c = self.config
        outputs, value = self.network(weights, rows)
        mean = mean_over(rows.get("valid"))
        policy_loss = -mean(self.distribution.log_prob(outputs, rows["action"]) * rows["advantage"])
        value_loss = mean((value - rows["target"]).square())
        entropy = mean(self.distribution.entropy(outputs))
        metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        return policy_loss + c.vf_coef * value_loss - c.ent_coef * entropy, {k: x.detach() for k, x in metrics.items()}
