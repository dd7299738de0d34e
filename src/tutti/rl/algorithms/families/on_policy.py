"""The family of algorithms that learn from what their present policy has just done, and then forget it."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tutti.rl.core import agent, collect, keys
from tutti.rl.core.env import Env

Tree = dict[str, Any]


class OnPolicy(agent.Agent):
    """A rollout of `n_steps` in each of `n_envs` environments, then `update`."""

    @dataclass(frozen=True)
    class Config(agent.Config):
        n_envs: int = 8
        n_steps: int = 128

    @abstractmethod
    def update(self, learner: Tree, chunk: Tree, key: Tensor) -> tuple[Tree, Tree]:
        """Learn from a chunk (`tutti.rl.core.collect`, normalized). Returns the learner and metrics."""

    def iterate(self, run: Tree) -> tuple[Tree, Tree]:
        assert isinstance(self.env, Env)
        steps = self.config.n_steps
        actor, chunk = collect.rollout(self, self.env, self.acting(run["learner"]), run["actor"],
                                       keys.fold(run["key"], 0), steps)  # fmt: skip
        run, metrics = self.absorb(run, chunk)
        return {**run, "actor": actor}, metrics

    def absorb(self, run: Tree, chunk: Tree) -> tuple[Tree, Tree]:
        steps, n = chunk["terminated"].shape
        episodes = {name: chunk.pop(name) for name in ("return", "length")}
        learner, chunk = self.normalizer.update(run["learner"], chunk, self.config.gamma)
        learner, metrics = self.update(learner, chunk, keys.fold(run["key"], 1))
        run = self.advance({**run, "learner": learner, "key": keys.fold(run["key"], 2)}, steps * n)
        return run, {**metrics, "episodes": episodes}
