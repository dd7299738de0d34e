"""Twin delayed DDPG (Fujimoto, van Hoof and Meger, 2018): two critics, noise on target actions, rarer actor updates.

y = r + gamma min_i Q_i'(s', clip(pi'(s') + clip(N(0, sigma), -c, c), -1, 1))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tutti.rl.algorithms.continuous.ddpg import DDPG
from tutti.rl.core import keys
from tutti.rl.core.agent import Number

Tree = dict[str, Any]


class TD3(DDPG):
    """Options: `TD3.Config`."""

    @dataclass(frozen=True)
    class Config(DDPG.Config):
        """policy_delay: updates of critics for one of the actor. target_policy_noise, target_noise_clip: sigma, c."""

        policy_delay: int = 2
        target_policy_noise: Number = 0.2
        target_noise_clip: Number = 0.5

    critics = 2

    def init(self, seed: int) -> Tree:
        return {**super().init(seed), "updates": torch.zeros((), dtype=torch.int64)}

    def next_value(self, learner: Tree, batch: Tree, key: Tensor) -> Tensor:
        c, action = self.config, self.pi(learner["target_actor"], batch["last"])
        noise = (c.target_policy_noise * keys.normal(key, action.shape)).clamp(
            -c.target_noise_clip, c.target_noise_clip
        )
        return self.critic(learner["target_critic"], batch["last"], (action + noise).clamp(-1, 1)).amin(0)

    def actor_step(self, learner: Tree, batch: Tree) -> Tree:
        learner = {**learner, "updates": learner["updates"] + 1}
        moved, due = super().actor_step(learner, batch), learner["updates"] % self.config.policy_delay == 0
        return pytree.tree_map(lambda a, b: torch.where(due, a, b), moved, learner)
