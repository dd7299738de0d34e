"""The family of algorithms that learn from recorded steps, without an environment.

    agent = IQL("Pendulum-v1", data="expert-v0").learn(10_000)

The environment gives the spaces, and it is where `evaluate` measures the policy. `num_timesteps`, and what `learn`
takes, count updates, as there are no steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

import tutti
from tutti.rl.core import agent, keys
from tutti.rl.core.normalize import EPS, Normalizer
from tutti.rl.core.ranges import Range
from tutti.rl.dataset import Rows, rows_of

Tree = dict[str, Any]


class Offline(agent.Agent):
    """`gradient_steps` of `update` on batches of a data set, in each iteration.

    data: see `tutti.rl.dataset`. Without data an agent can act, as one that was loaded from a file, but not learn.
    Files do not hold the data: pass `data=` to `load`, too, to continue.
    """

    @dataclass(frozen=True)
    class Config(agent.Config):
        """gradient_steps: updates of an iteration. tau: rate of the targets' slow average. normalize_obs: whether
        observations are normalized by the mean and the standard deviation of the data."""

        learning_rate: agent.Rate = 3e-4
        batch_size: int = 256
        gradient_steps: int = 100
        tau: agent.Number = 0.005

    multi_agent = sees = pixels = gaps = False
    ranges: ClassVar[dict[str, Range]] = {"gradient_steps": Range(1, unit="updates of an iteration")}
    unused = ("n_envs", "n_steps", "normalize_reward")

    def __init__(self, *args: Any, data: Any = None, **options: Any):
        self.data = data
        super().__init__(*args, **options)

    # Learns from a batch: (learner, batch, key) -> (learner, errors (count,), metrics). A batch has the names of
    # `tutti.rl.dataset`, "discount", what the value of `last` counts, and "weight", of ones. Not declared as a method,
    # so that `class TD3BC(Offline, TD3)` has that of TD3.
    update: Callable[[Tree, Tree, Tensor], tuple[Tree, Tensor, Tree]]

    def prepared(self, rows: Rows) -> Rows:
        """The data as the run holds them. rows: see `tutti.rl.dataset`, with normalized observations."""
        return rows

    def sample(self, rows: Rows, key: Tensor) -> Tree:
        """A batch for `update`."""
        c, n = self.config, rows["reward"].shape[0]
        index = keys.integers(key, (c.batch_size,), n)
        batch = {name: x[index] for name, x in rows.items()}
        discount = torch.where(batch["terminated"], torch.zeros(()), c.gamma)
        return {**batch, "discount": discount, "weight": torch.ones(c.batch_size)}

    def iterate(self, run: Tree) -> tuple[Tree, Tree]:
        c, rows, key = self.config, run["replay"], run["key"]

        def body(learner: Tree, i: Tensor) -> tuple[Tree, Tree]:
            of_sample, of_update = keys.split(keys.fold(key, i + 3))
            learner, _, metrics = self.update(learner, self.sample(rows, of_sample), of_update)
            return learner, metrics

        learner, metrics = tutti.scan(body, run["learner"], torch.arange(c.gradient_steps))
        run = self.advance({**run, "learner": learner, "key": keys.fold(key, 2)}, c.gradient_steps)
        return run, {name: x.mean() for name, x in metrics.items()}

    def phase(self) -> Callable[[Tree], tuple[Tree, Tree]]:
        return self.iterate

    def absorb(self, run: Tree, chunk: Tree) -> tuple[Tree, Tree]:
        raise NotImplementedError("an offline algorithm learns from its data only")

    @property
    def steps_per_iteration(self) -> int:
        return self.config.gradient_steps

    def step(self) -> None:
        """One iteration: `gradient_steps` updates."""
        if self.data is None:
            raise ValueError(f"{type(self).__name__} has no data to learn from; pass data=")
        start, count = time.perf_counter(), self.steps_per_iteration
        metrics = self.program.call(self.phase())
        self.num_timesteps += count
        self.metrics = self._finite(metrics)
        self.metrics["updates_per_second"] = count / (time.perf_counter() - start)

    def save(self, path: str | Path, replay: bool = False, score: float | None = None) -> Path:
        """As `Agent.save`, without the data."""
        return super().save(path, False, score)

    def _begin(self) -> None:
        c = self.config
        spaced = self.env.observation_space, self.env.action_space
        rows = None if self.data is None else rows_of(self.data, self.features, self.distribution, spaced)
        self.normalizer = OfData(self.features.size, c, rows)
        if rows is None:
            self.rows_held: Tree = {}
        else:
            norm = self.normalizer.init(())
            for key in ("obs", "last"):
                rows[key] = self.normalizer.apply(norm, rows[key])
            self.rows_held = dict(self.prepared(rows))
        super()._begin()
        self.rows_held = {}

    def more_state(self) -> Tree:
        return {"replay": self.rows_held}


class OfData(Normalizer):
    """Statistics of the observations of a data set."""

    def __init__(self, size: int, config: Any, rows: Rows | None):
        super().__init__(size, config.normalize_obs)
        self.rows = None if rows is None else rows["obs"]
        if rows is not None and self.obs:
            var, mean = torch.var_mean(rows["obs"], 0, correction=0)
            self.stats = {"count": torch.full((), float(len(rows["obs"]))), "mean": mean, "var": var + EPS}
        else:
            self.stats = None

    def init(self, rows: tuple[int, ...]) -> Tree:
        if not self.obs:
            return {}
        return {"obs_norm": self.stats} if self.stats is not None else super().init(rows)
