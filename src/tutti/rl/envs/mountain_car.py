"""Mountain car: drive a weak car out of a valley (Moore 1990).

The discrete one is gymnasium's `MountainCar-v0`, the other its `MountainCarContinuous-v0`.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from tutti.rl.core import keys
from tutti.rl.core.env import Env, State, Step
from tutti.rl.envs.canvas import BLUE, GRAY, GREEN, Canvas

LEFT, RIGHT, FASTEST, GRAVITY = -1.2, 0.6, 0.07, 0.0025  # positions of the walls; units of length are arbitrary


class MountainCar(Env):
    """Observation: position and velocity. Action: 0 push to the left, 1 nothing, 2 push to the right.

    Reward -1 for each step. Terminates at position 0.5, on top of the right hill.
    """

    observation_space = spaces.Box(np.array([LEFT, -FASTEST], np.float32), np.array([RIGHT, FASTEST], np.float32))
    action_space: spaces.Space = spaces.Discrete(3)
    limit, threshold = 200, -110.0
    goal, push = 0.5, 0.001

    def reset(self, key: Tensor, n: int) -> tuple[State, Tensor]:
        position = keys.uniform(key, (n,), -0.6, -0.4)
        x = torch.stack([position, torch.zeros_like(position)], -1)
        return {"x": x, "t": torch.zeros(n, dtype=torch.int64, device=key.device)}, x

    def step(self, state: State, action: Tensor, key: Tensor) -> Step:
        return self.roll(state, action - 1)

    def roll(self, state: State, force: Tensor) -> Step:
        """One step under a force in units of `push`. force: (n,)."""
        position, velocity = state["x"].unbind(-1)
        velocity = velocity + force.to(velocity.dtype) * self.push - GRAVITY * (3 * position).cos()
        velocity = velocity.clamp(-FASTEST, FASTEST)
        position = (position + velocity).clamp(LEFT, RIGHT)
        velocity = torch.where((position == LEFT) & (velocity < 0), 0.0, velocity)
        terminated = (position >= self.goal) & (velocity >= 0)
        x, t = torch.stack([position, velocity], -1), state["t"] + 1
        return {"x": x, "t": t}, x, -torch.ones_like(position), terminated, self.truncated(t)

    def draw(self, state: State, i: int) -> np.ndarray:
        """The height of the hills is sin(3 position) / 2."""
        canvas = Canvas(LEFT, -0.6, RIGHT, 0.8)
        canvas.fill(canvas.y - np.sin(3 * canvas.x) / 2, GRAY)
        canvas.line(
            (self.goal, math.sin(3 * self.goal) / 2), (self.goal, math.sin(3 * self.goal) / 2 + 0.2), 0.02, GREEN
        )
        position = float(state["x"][i, 0])
        canvas.disk(position, math.sin(3 * position) / 2 + 0.05, 0.05, BLUE)
        return canvas.picture()


class MountainCarContinuous(MountainCar):
    """As `MountainCar`, with a force in [-1, 1] as the action.

    Reward -0.1 force^2 for each step, and 100 for reaching position 0.45, where the episode terminates. The cost is
    that of the force asked for, even outside of [-1, 1].
    """

    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    limit, threshold = 999, 90.0
    goal, push = 0.45, 0.0015

    def step(self, state: State, action: Tensor, key: Tensor) -> Step:
        force = action[..., 0].to(state["x"].dtype)
        state, x, _, terminated, truncated = self.roll(state, force.clamp(-1, 1))
        return state, x, 100 * terminated - 0.1 * force.square(), terminated, truncated
