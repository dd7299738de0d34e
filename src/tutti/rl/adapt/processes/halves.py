"""Two groups of environments, of which one steps while actions of the other are computed."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from tutti.rl.adapt import layout
from tutti.rl.adapt.processes.workers import Workers
from tutti.rl.core.vector import Moved, VectorEnv


class Halves(VectorEnv):
    """Two `Workers` of the same environment as one environment.

        env = Halves(Workers(factory, 16, 2), Workers(factory, 16, 2))
        obs = env.reset(0)
        for half, x in zip(env.halves, env.split(obs)):
            half.send(policy(x))
        while True:
            for half in env.halves:
                moved = half.recv()            # the other half is under way
                half.send(policy(moved.obs))

    Instances of the first half come before those of the second. `step` steps both halves together.
    """

    def __init__(self, first: Workers, second: Workers):
        if (first.observation_space, first.action_space) != (second.observation_space, second.action_space):
            raise ValueError(f"the halves are of unlike environments: {first.name} and {second.name}")
        self.halves = (first, second)
        self.n, self.name, self.agents = first.n + second.n, first.name, first.agents
        self.observation_space, self.action_space = first.observation_space, first.action_space
        self.gaps = first.gaps
        self.limit, self.threshold, self.starts = first.limit, first.threshold, first.starts

    @property
    def restarts(self) -> int:
        return sum(half.restarts for half in self.halves)

    def split(self, batch: layout.Batch) -> tuple[layout.Batch, layout.Batch]:
        """The parts of a batch of all n instances that belong to each half."""
        middle = self.halves[0].n
        return layout.rows(batch, slice(middle)), layout.rows(batch, slice(middle, None))

    def reset(self, seed: int | None = None) -> layout.Batch:
        first, second = self.halves
        return _join(first.reset(seed), second.reset(None if seed is None else seed + first.n))

    def step(self, action: Any) -> Moved:
        for half, x in zip(self.halves, self.split(action), strict=True):
            half.send(x)
        a, b = (half.recv() for half in self.halves)
        for name in ("masks", "overview"):  # a half in which no episode ended may leave those of the last out
            for half, moved in ((self.halves[0], a), (self.halves[1], b)):
                if getattr(moved, f"last_{name}") is None:
                    setattr(moved, f"last_{name}", getattr(half, name)())
        return Moved(**{x.name: _join(getattr(a, x.name), getattr(b, x.name)) for x in fields(Moved)})

    def masks(self) -> np.ndarray | None:
        return _join(*(half.masks() for half in self.halves))

    def overview(self) -> np.ndarray | None:
        return _join(*(half.overview() for half in self.halves))

    def draw(self, i: int = 0) -> np.ndarray | None:
        first, second = self.halves
        return first.draw(i) if i < first.n else second.draw(i - first.n)

    def state(self) -> list[Any]:
        return [half.state() for half in self.halves]

    def restore(self, state: list[Any]) -> layout.Batch:
        return _join(*(half.restore(part) for half, part in zip(self.halves, state, strict=True)))

    def close(self) -> None:
        for half in self.halves:
            half.close()


def _join(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return None
    return {key: _join(a[key], b[key]) for key in a} if isinstance(a, dict) else np.concatenate([a, b])
