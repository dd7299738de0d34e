"""Multi-agent proximal policy optimization (Yu et al., 2022, arXiv 2103.01955): PPO with a central value function.

The value function sees the overview of the environment, or where it has none the observations of all agents, and which
agent it is for. Policies see only their own observation, so that they can act without the others. The team is rewarded
with the mean over its agents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tutti.rl import teams
from tutti.rl.algorithms.multi_agent.ippo import IPPO

Tree = dict[str, Any]


class MAPPO(IPPO):
    """Options: `MAPPO.Config`."""

    @dataclass(frozen=True)
    class Config(IPPO.Config):
        team: bool = True

    def critic_input(self, chunk: Tree, prefix: str) -> Tensor:
        return self.policy_input(teams.for_each(teams.seen_by_all(chunk, prefix), self.count))

    def critic_size(self) -> int:
        return teams.width_for_all(self) + self.count * self.config.agent_ids
