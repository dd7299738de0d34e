"""Agents that act together: who is who, what all of them see, and what all of them earn.

Dim -2 of what agents see is that of agents: (..., agents, size). Rewards are (..., agents).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tutti.rl.core import keys
from tutti.rl.core.env import Env
from tutti.rl.networks.pixels import scaled

Tree = dict[str, Any]


def with_ids(obs: Tensor) -> Tensor:
    """Observations followed by the agent's index, one-hot: (..., agents, size + agents)."""
    obs, agents = scaled(obs), obs.shape[-2]
    ids = torch.eye(agents, dtype=obs.dtype, device=obs.device)
    return torch.cat([obs, ids.expand(*obs.shape[:-1], agents)], -1)


def seen_by_all(chunk: Tree, prefix: str = "") -> Tensor:
    """Inputs of a central critic, before or (prefix "last_") after the step, (..., features): the overview of the
    environment, or else the concatenated observations of all agents."""
    overview = chunk.get(f"{prefix}overview")
    return (chunk["last"] if prefix else chunk["obs"]).flatten(-2) if overview is None else overview


def width_for_all(agent: Any) -> int:
    """Features of `seen_by_all`."""
    env = agent.env
    if isinstance(env, Env):
        overview = env.overview(env.reset(keys.make(0), 1)[0])
    else:
        env.reset(0)  # adapters know the overview only after a reset
        overview = env.overview()
    return agent.features.size * len(env.agents) if overview is None else overview.shape[-1]


def several(agent: Any) -> int:
    """The number of agents. Raises ValueError where there is one."""
    if (count := len(agent.env.agents)) < 2:
        raise ValueError(f"{type(agent).__name__} is for several agents, and {agent.env.name} has one: use an "
                         "environment such as 'simple_spread_v3', or PPO or DQN")  # fmt: skip
    return count


def for_each(x: Tensor, agents: int) -> Tensor:
    """Repeat for each agent what all agents share: (..., size) to (..., agents, size)."""
    return x.unsqueeze(-2).expand(*x.shape[:-1], agents, x.shape[-1])


def one_hot(action: Tensor, size: int) -> Tensor:
    """float32 (..., size). `torch.nn.functional.one_hot` checks values, which gradients in a captured step cannot."""
    return (action.unsqueeze(-1) == torch.arange(size, device=action.device)).float()


def team_reward(reward: Tensor) -> Tensor:
    """The mean over agents, for each of them: as `reward`."""
    return reward.mean(-1, keepdim=True).expand_as(reward)
