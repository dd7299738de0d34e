"""CartPole: balance a pole on a cart (Barto, Sutton and Anderson 1983; gymnasium's `CartPole-v1`)."""

from __future__ import annotations

import math

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from tutti.rl.core import keys
from tutti.rl.core.env import Env, State, Step
from tutti.rl.envs.canvas import BLACK, GRAY, ORANGE, Canvas

GRAVITY, CART, POLE, LENGTH, FORCE, DT = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02  # m/s^2, kg, kg, m (half of the pole), N, s
FARTHEST, STEEPEST = 2.4, 12 * 2 * math.pi / 360  # m, rad


class CartPole(Env):
    """Observation: position (m), velocity (m/s), angle (rad), angular velocity (rad/s). Action: 0 left, 1 right.

    Reward 1 for each step. Terminates when the cart or the pole is too far from the middle.
    """

    observation_space = spaces.Box(
        np.array([-2 * FARTHEST, -np.inf, -2 * STEEPEST, -np.inf], np.float32),
        np.array([2 * FARTHEST, np.inf, 2 * STEEPEST, np.inf], np.float32),
    )
    action_space = spaces.Discrete(2)
    limit, threshold = 500, 475.0

    def reset(self, key: Tensor, n: int) -> tuple[State, Tensor]:
        x = keys.uniform(key, (n, 4), -0.05, 0.05)
        return {"x": x, "t": torch.zeros(n, dtype=torch.int64)}, x

    def step(self, state: State, action: Tensor, key: Tensor) -> Step:
        x, v, angle, spin = state["x"].unbind(-1)
        force = torch.where(action == 1, FORCE, -FORCE)
        cos, sin = angle.cos(), angle.sin()
        pushed = (force + POLE * LENGTH * spin.square() * sin) / (CART + POLE)
        turned = (GRAVITY * sin - cos * pushed) / (LENGTH * (4 / 3 - POLE * cos.square() / (CART + POLE)))
        moved = pushed - POLE * LENGTH * turned * cos / (CART + POLE)
        x, angle, v, spin = x + DT * v, angle + DT * spin, v + DT * moved, spin + DT * turned
        after = torch.stack([x, v, angle, spin], -1)
        t = state["t"] + 1
        terminated = (x.abs() > FARTHEST) | (angle.abs() > STEEPEST)
        return {"x": after, "t": t}, after, torch.ones_like(x), terminated, self.truncated(t)

    def draw(self, state: State, i: int) -> np.ndarray:
        x, _, angle, _ = state["x"][i].tolist()
        canvas = Canvas(-FARTHEST, -0.6, FARTHEST, 1.6)
        canvas.line((-FARTHEST, 0), (FARTHEST, 0), 0.02, GRAY)
        canvas.box(x, 0, 0.5, 0.25, BLACK)
        canvas.line((x, 0.1), (x + 2 * LENGTH * math.sin(angle), 0.1 + 2 * LENGTH * math.cos(angle)), 0.09, ORANGE)
        return canvas.picture()
