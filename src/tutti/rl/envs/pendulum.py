"""Pendulum: swing a pendulum up and hold it there (gymnasium's `Pendulum-v1`)."""

from __future__ import annotations

import math

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from tutti.rl.core import keys
from tutti.rl.core.env import Env, State, Step
from tutti.rl.envs.canvas import BLACK, RED, Canvas

GRAVITY, MASS, LENGTH, DT = 10.0, 1.0, 1.0, 0.05  # m/s^2, kg, m, s
FASTEST, STRONGEST = 8.0, 2.0  # rad/s, N m


class Pendulum(Env):
    """Observation: cosine and sine of the angle (0 is upright), angular velocity (rad/s). Action: torque (N m).

    Reward -(angle^2 + 0.1 velocity^2 + 0.001 torque^2), the angle in [-pi, pi). Never terminates. gymnasium gives no
    threshold; in the benchmark of RL Baselines3 Zoo, A2C, DDPG, PPO, SAC and TD3 return between -151 and -173.

    state["x"]: angle and angular velocity, (n, 2).
    """

    observation_space = spaces.Box(np.array([-1, -1, -FASTEST], np.float32), np.array([1, 1, FASTEST], np.float32))
    action_space = spaces.Box(-STRONGEST, STRONGEST, (1,), np.float32)
    limit, threshold = 200, -200.0

    def reset(self, key: Tensor, n: int) -> tuple[State, Tensor]:
        angle, spin = keys.uniform(key, (n, 2), -1.0, 1.0).unbind(-1)
        x = torch.stack([math.pi * angle, spin], -1)
        return {"x": x, "t": torch.zeros(n, dtype=torch.int64, device=key.device)}, observe(x[:, 0], x[:, 1])

    def step(self, state: State, action: Tensor, key: Tensor) -> Step:
        angle, spin = state["x"].unbind(-1)
        torque = action[..., 0].clamp(-STRONGEST, STRONGEST).to(angle.dtype)
        off = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
        reward = -(off.square() + 0.1 * spin.square() + 0.001 * torque.square())
        turned = 3 * GRAVITY / (2 * LENGTH) * angle.sin() + 3 / (MASS * LENGTH**2) * torque
        spin = (spin + DT * turned).clamp(-FASTEST, FASTEST)
        angle = angle + DT * spin
        t = state["t"] + 1
        after = {"x": torch.stack([angle, spin], -1), "t": t}
        return after, observe(angle, spin), reward, torch.zeros_like(t, dtype=torch.bool), self.truncated(t)

    def draw(self, state: State, i: int) -> np.ndarray:
        angle = float(state["x"][i, 0])
        canvas = Canvas(-1.3, -1.3, 1.3, 1.3)
        canvas.line((0, 0), (-LENGTH * math.sin(angle), LENGTH * math.cos(angle)), 0.2, RED)
        canvas.disk(0, 0, 0.06, BLACK)
        return canvas.picture()


def observe(angle: Tensor, spin: Tensor) -> Tensor:
    return torch.stack([angle.cos(), angle.sin(), spin], -1)
