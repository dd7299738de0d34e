"""IMPALA (Espeholt et al., 2018): an actor-critic that corrects for actors whose policy is older than the learner's.

Targets and advantages are those of V-trace, with the ratios of the learner's policy to that which acted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutti.rl.algorithms.policy_gradient.a2c import A2C
from tutti.rl.core.agent import Number, Rate
from tutti.rl.core.descent import RMSProp
from tutti.rl.core.returns import mean_of, vtrace

Tree = dict[str, Any]


class IMPALA(A2C):
    """Options: `IMPALA.Config`."""

    @dataclass(frozen=True)
    class Config(A2C.Config):
        """rho, c: upper bounds of the ratios in V-trace. lam: lambda of its traces."""

        n_steps: int = 20
        learning_rate: Rate = 6e-4
        ent_coef: Number = 0.01
        max_grad_norm: Number = 40.0
        rho: float = 1.0
        c: float = 1.0
        lam: Number = 1.0

    unused = ("gae_lambda",)

    def build(self) -> None:
        super().build()
        self.adam = RMSProp(eps=0.01, inside=True, clip=self.config.max_grad_norm)

    def update(self, learner: Tree, chunk: Tree, key: Tensor) -> tuple[Tree, Tree]:
        c = self.config
        value, after, terminated, done = self.values(learner, chunk)
        rows = {**self.inputs(chunk), "action": chunk["action"]}
        log_prob = self.distribution.log_prob(self.network(learner["weights"], rows)[0], chunk["action"])
        ratio = (log_prob - chunk["log_prob"]).exp()
        target, advantage = vtrace(ratio, chunk["reward"], value, after, terminated, done, c.gamma, c.lam, c.rho, c.c)
        rows |= {"target": target, "advantage": advantage}
        gradient, metrics = torch.func.grad(self.loss, has_aux=True)(learner["weights"], rows)
        weights, state = self.adam.step(learner["weights"], gradient, learner["adam"], self.rate(learner))
        return {**learner, "weights": weights, "adam": state}, {**metrics, "ratio": mean_of(ratio, chunk.get("valid"))}
