"""Experts whom imitation learns from: trained agents, functions, and presets by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tutti.rl.core import keys
from tutti.rl.core.agent import Agent

Tree = dict[str, Any]
Expert = Agent | Callable[[Tensor], Tensor] | str


def actions_of(expert: Expert, learner: Agent) -> Callable[[Tree], Tensor]:
    """The policy of an expert, as a function from {"obs": features (n, size)} to actions of the learner.

    expert: an agent without a memory, as it is now; a function of features that returns actions of the environment; or
    the name of a preset, whose agent is trained first.

    Raises ValueError for agents with a memory.
    """
    if isinstance(expert, str):
        expert = trained(expert)
    if not isinstance(expert, Agent):
        function = expert
        return lambda seen: learner.from_user(function(seen["obs"]))
    agent = expert
    if agent.carry(1):
        raise ValueError(f"an expert cannot have a memory, as {type(agent).__name__} has; record its episodes "
                         "(tutti.rl.offline_data), and use BC")  # fmt: skip
    policy = pytree.tree_map(torch.clone, agent.acting(agent.program.state()["learner"]))

    def act(seen: Tree) -> Tensor:
        action, _, _ = agent.act(policy, agent.normalized(policy, seen), {}, keys.make(0), False)
        return learner.from_user(agent.to_user(action))

    return act


def trained(name: str, seed: int = 0, level: str = "eager") -> Agent:
    """The agent of a preset, after its steps of learning."""
    from tutti.rl.algorithms import algorithm
    from tutti.rl.presets import preset

    row = preset(name)
    return algorithm(row.algorithm)(row.env, seed=seed, level=level, **row.options).learn(row.steps)
