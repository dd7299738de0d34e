"""Acrobot: swing the tip of a two-link arm up by a motor between the links (Sutton 1996; gymnasium's `Acrobot-v1`)."""

from __future__ import annotations

import math

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from tutti.rl.core import keys
from tutti.rl.core.env import Env, State, Step
from tutti.rl.envs.canvas import BLACK, BLUE, GRAY, ORANGE, Canvas

GRAVITY, DT = 9.8, 0.2  # m/s^2, s; links are 1 m long, of 1 kg, with their mass in the middle
CENTER, INERTIA = 0.5, 1.0  # m, kg m^2
FASTEST = 4 * math.pi, 9 * math.pi  # rad/s
HIGH = np.array([1, 1, 1, 1, *FASTEST], np.float32)


class Acrobot(Env):
    """Observation: cosine and sine of both angles, angular velocities (rad/s). Action: torque of -1, 0 or 1 N m.

    The first angle is 0 where the first link hangs down, the second is relative to the first. Reward -1 for each step,
    and 0 for the one that reaches the height of 1 m above the fixed end, where the episode terminates.

    state["x"]: angles and angular velocities, (n, 4).
    """

    observation_space = spaces.Box(-HIGH, HIGH)
    action_space = spaces.Discrete(3)
    limit, threshold = 500, -100.0

    def reset(self, key: Tensor, n: int) -> tuple[State, Tensor]:
        x = keys.uniform(key, (n, 4), -0.1, 0.1)
        return {"x": x, "t": torch.zeros(n, dtype=torch.int64, device=key.device)}, observe(x[:, :2], x[:, 2:])

    def step(self, state: State, action: Tensor, key: Tensor) -> Step:
        x = state["x"]
        torque = (action - 1).to(x.dtype)
        k1 = derivative(x, torque)
        k2 = derivative(x + DT / 2 * k1, torque)
        k3 = derivative(x + DT / 2 * k2, torque)
        k4 = derivative(x + DT * k3, torque)
        x = x + DT / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        angles = torch.remainder(x[:, :2] + math.pi, 2 * math.pi) - math.pi
        spins = torch.stack([s.clamp(-limit, limit) for s, limit in zip(x[:, 2:].unbind(-1), FASTEST, strict=True)], -1)
        t = state["t"] + 1
        terminated = -angles[:, 0].cos() - angles.sum(-1).cos() > 1
        reward = terminated.to(x.dtype) - 1
        after = {"x": torch.cat([angles, spins], -1), "t": t}
        return after, observe(angles, spins), reward, terminated, self.truncated(t)

    def draw(self, state: State, i: int) -> np.ndarray:
        first, second, _, _ = state["x"][i].tolist()
        canvas = Canvas(-2.2, -2.2, 2.2, 2.2)
        canvas.line((-2.2, 1), (2.2, 1), 0.02, GRAY)
        elbow = math.sin(first), -math.cos(first)
        canvas.line((0, 0), elbow, 0.15, BLUE)
        tip = elbow[0] + math.sin(first + second), elbow[1] - math.cos(first + second)
        canvas.line(elbow, tip, 0.15, ORANGE)
        canvas.disk(0, 0, 0.06, BLACK)
        return canvas.picture()


def derivative(x: Tensor, torque: Tensor) -> Tensor:
    """Velocities and accelerations of the joints, (n, 4): Sutton and Barto's book, figure of the Acrobot."""
    angle1, angle2, spin1, spin2 = x.unbind(-1)
    cos2, sin2 = CENTER * angle2.cos(), CENTER * angle2.sin()
    d1 = 2 * CENTER**2 + 1 + 2 * cos2 + 2 * INERTIA
    d2 = CENTER**2 + cos2 + INERTIA
    phi2 = CENTER * GRAVITY * (angle1 + angle2).sin()
    phi1 = phi2 + (CENTER + 1) * GRAVITY * angle1.sin() - sin2 * spin2 * (spin2 + 2 * spin1)
    ratio = d2 / d1
    turned2 = (torque + ratio * phi1 - sin2 * spin1.square() - phi2) / (CENTER**2 + INERTIA - d2 * ratio)
    turned1 = -(ratio * turned2 + phi1 / d1)
    return torch.stack([spin1, spin2, turned1, turned2], -1)


def observe(angles: Tensor, spins: Tensor) -> Tensor:
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([torch.stack([cos, sin], -1).flatten(1), spins], -1)
