"""REINFORCE (Williams 1992), with a learned baseline: E[grad log pi(a|s) (R - V(s))].

R is the discounted sum of rewards to the end of the episode; where the rollout ends before, the value of its last
observation continues it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tutti.rl.algorithms.policy_gradient.a2c import A2C
from tutti.rl.core.agent import Number, Rate
from tutti.rl.core.descent import Adam


class REINFORCE(A2C):
    """Options: `REINFORCE.Config`."""

    @dataclass(frozen=True)
    class Config(A2C.Config):
        n_steps: int = 200
        learning_rate: Rate = 5e-3
        gae_lambda: Number = 1.0

    def build(self) -> None:
        super().build()
        self.adam = Adam(clip=self.config.max_grad_norm)
