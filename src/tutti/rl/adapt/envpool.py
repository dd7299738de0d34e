"""Environments of EnvPool, which steps them in threads of its own, written in C++."""

from __future__ import annotations

from typing import Any

import numpy as np

from tutti.rl.adapt import checked, layout
from tutti.rl.adapt.packages import package
from tutti.rl.core.vector import Moved, VectorEnv

ENDLESS = 2**31 - 1  # what EnvPool calls the limit of an environment without one


class EnvPool(VectorEnv):
    """n instances of an environment of EnvPool, `pip install envpool`.

        env = EnvPool("Pong-v5", 64, num_threads=8)

    kwargs: arguments of `envpool.make_gymnasium`, for example `num_threads`. The episodes of a seed are EnvPool's own,
    unlike those of gymnasium. A reset with a seed makes a new pool. EnvPool cannot save states.
    """

    def __init__(self, id: str, n: int, **kwargs: Any):
        if "batch_size" in kwargs or "seed" in kwargs:
            raise ValueError("batch_size and seed cannot be chosen: all instances step together; give reset the seed")
        self.id, self.n, self.kwargs, self.steps = id, n, kwargs, 0
        self.pool = self._make(None)
        config = self.pool.spec.config
        self.name, self.threshold = id, getattr(config, "reward_threshold", None)
        self.limit = None if config.max_episode_steps in (None, ENDLESS) else int(config.max_episode_steps)
        self.spaces = self.pool.observation_space, self.pool.action_space
        self.observation_space = layout.plain(self.spaces[0], f"{id}.observation_space")
        self.action_space = layout.plain(self.spaces[1], f"{id}.action_space")
        self.starts = layout.starts(self.spaces[0]), layout.starts(self.spaces[1])

    def reset(self, seed: int | None = None) -> layout.Batch:
        self.steps = 0
        if seed is not None:
            self.pool.close()
            self.pool = self._make([seed + i for i in range(self.n)])
        self.obs = self._batch(self.pool.reset()[0])
        return self.obs

    def step(self, action: Any) -> Moved:
        action = layout.restore(self.spaces[1], action, self.n)
        self.steps += 1
        obs, reward, terminated, truncated, _ = self.pool.step(action)
        last = self.obs = self._batch(obs)
        done = terminated | truncated
        if done.any():
            # EnvPool would spend the next step of these on their reset
            first = self.pool.reset(np.flatnonzero(done).astype(np.int32))[0]
            self.obs = layout.put(last, done, self._batch(first))
        return Moved(self.obs, checked.rewards(self.name, reward, self.steps), terminated, truncated, last)

    def close(self) -> None:
        self.pool.close()

    def _make(self, seed: list[int] | None) -> Any:
        make: Any = package("envpool").make_gymnasium
        seeds = np.random.SeedSequence().generate_state(self.n) >> 1 if seed is None else seed
        return make(self.id, num_envs=self.n, seed=[int(x) for x in seeds], **self.kwargs)

    def _batch(self, obs: Any) -> layout.Batch:
        return checked.batch(self.name, self.spaces[0], obs, self.steps)
