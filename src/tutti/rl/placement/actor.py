"""The environments of a rank, and the program that acts in them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tutti.rl.core import collect, keys
from tutti.rl.core.agent import Agent
from tutti.rl.core.env import Env

Tree = dict[str, Any]


class Actor:
    """Acts in the environments of an agent, with a state of its own."""

    def __init__(self, agent: Agent, rank: int):
        self.agent, self.rank = agent, rank
        state = agent.program.state()
        self.key = state["key"].clone()
        self.state = pytree.tree_map(torch.clone, state.get("actor", {}))
        self.count = 0

    @property
    def pure(self) -> bool:
        return isinstance(self.agent.env, Env)

    def act(self, policy: Tree, learner: Agent) -> Tree:
        """Collect a chunk of experience. learner: its `num_timesteps` sets the phase of exploration."""
        agent, self.count = self.agent, self.count + 1
        agent.num_timesteps = learner.num_timesteps
        act = agent.behaviour()
        if not isinstance(agent.env, Env):
            return agent.host.collect(agent, policy=policy)
        env, steps = agent.env, agent.config.n_steps

        def chunk(run: Tree, policy: Tree, state: Tree, key: Tensor) -> tuple[Tree, Tree]:
            return collect.rollout(agent, env, policy, state, key, steps, act=act)

        function = agent.functions.setdefault(("chunk", act), chunk)
        self.state, experience = agent.program.ask(function, policy, self.state, keys.fold(self.key, self.count))
        return experience

    def example(self, policy: Tree) -> Tree:
        """A chunk of zeros with the shapes and dtypes of every chunk."""
        agent = self.agent
        assert isinstance(agent.env, Env), "asynchronous actors need a pure environment"
        with torch.no_grad():
            rows = collect.rollout(agent, agent.env, policy, self.state, self.key, 1, act=agent.behaviour())[1]
        return {k: x.new_zeros(agent.config.n_steps, *x.shape[1:]) for k, x in rows.items()}

    def tensors(self) -> Tree:
        """The state for a checkpoint. Environments on the host begin new episodes when they continue."""
        return {"state": self.state, "count": torch.tensor(self.count)}

    def restore(self, tensors: Tree) -> None:
        self.state, self.count = pytree.tree_map(torch.clone, tensors["state"]), int(tensors["count"])
