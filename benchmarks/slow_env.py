"""An environment of gymnasium whose steps take a millisecond of work in Python: `slow_env:Slow-v0`."""

from __future__ import annotations

import math

import gymnasium
import numpy as np

WORK = 8_000  # sines of a step


class Slow(gymnasium.Env):
    """CartPole's observations and actions; a reward for following a sine."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.t, self.phase = 0, float(self.np_random.uniform(0, 6.28))
        return self._seen(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.t, x = self.t + 1, self.phase
        for _ in range(WORK):
            x = math.sin(x) + 1.0
        reward = float((math.sin(self.phase + 0.1 * self.t) > 0) == bool(action)) + 0.0 * x
        return self._seen(), reward, False, self.t >= 200, {}

    def _seen(self) -> np.ndarray:
        at = self.phase + 0.1 * self.t
        return np.array([math.sin(at), math.cos(at), math.sin(2 * at), math.cos(2 * at)], np.float32)


gymnasium.register("Slow-v0", Slow)
