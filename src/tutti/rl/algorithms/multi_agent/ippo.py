"""Independent proximal policy optimization (de Witt et al., 2020, arXiv 2011.09533): PPO for several agents.

All agents share the weights of one policy and one value function, and each learns from its own observations and
rewards. With `agent_ids` both networks also see which agent they act for, so that agents can take different roles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tutti.rl import teams
from tutti.rl.algorithms.policy_gradient.ppo import PPO

Tree = dict[str, Any]


class IPPO(PPO):
    """Options: `IPPO.Config`."""

    @dataclass(frozen=True)
    class Config(PPO.Config):
        """agent_ids: append the agent's index, one-hot, to observations. team: every agent is rewarded with the mean
        over agents, for tasks in which they cooperate."""

        agent_ids: bool = True
        team: bool = False

    sees = False

    def build(self) -> None:
        self.count = teams.several(self)
        super().build()

    def policy_input(self, obs: Tensor) -> Tensor:
        return teams.with_ids(obs) if self.config.agent_ids else obs

    def policy_size(self) -> int:
        return self.features.size + self.count * self.config.agent_ids

    def critic_input(self, chunk: Tree, prefix: str) -> Tensor:
        return self.policy_input(super().critic_input(chunk, prefix))

    def critic_size(self) -> int:
        return self.policy_size()

    def update(self, learner: Tree, chunk: Tree, key: Tensor) -> tuple[Tree, Tree]:
        if self.config.team:
            chunk = {**chunk, "reward": teams.team_reward(chunk["reward"])}
        return super().update(learner, chunk, key)
