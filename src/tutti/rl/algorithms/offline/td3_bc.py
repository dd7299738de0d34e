"""TD3 with a behavioral-cloning term (Fujimoto and Gu, 2021, arXiv 2106.06860).

Critics are those of TD3. The actor descends -lambda Q(s, pi(s)) + (pi(s) - a)^2 with lambda = alpha / mean |Q|, which
makes both terms comparable whatever the scale of rewards. Observations are normalized by the data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tutti.rl.algorithms.continuous.td3 import TD3
from tutti.rl.algorithms.families.offline import Offline
from tutti.rl.core.agent import Number, Rate

Tree = dict[str, Any]


class TD3BC(Offline, TD3):
    """Options: `TD3BC.Config`."""

    @dataclass(frozen=True)
    class Config(Offline.Config):
        """alpha: weight of the value against cloning. Others: those of TD3."""

        learning_rate: Rate = 3e-4
        hidden: tuple[int, ...] = (256, 256)
        activation: str = "relu"
        normalize_obs: bool = True
        alpha: Number = 2.5
        noise: Number = 0.1
        policy_delay: int = 2
        target_policy_noise: Number = 0.2
        target_noise_clip: Number = 0.5

    def actor_loss(self, weights: Tensor, learner: Tree, batch: Tree) -> Tensor:
        action = self.pi(weights, batch["obs"])
        q = self.critic(learner["critic"], batch["obs"], action)[0]
        scale = self.config.alpha / q.abs().mean().detach()
        return -scale * q.mean() + (action - batch["action"].flatten(1)).square().mean()
