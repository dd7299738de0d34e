"""Catch: move a paddle below a falling ball (Mnih et al. 2014; bsuite's `catch`)."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from tutti.rl.core import keys
from tutti.rl.core.env import Env, State, Step


class Catch(Env):
    """Observation: the board, (rows, columns), 1 where the ball and the paddle are. Action: 0 left, 1 stay, 2 right.

    The ball falls by one row in each step. Where it reaches the last row, in which the paddle is, the episode
    terminates with a reward of 1 if the paddle is below it, else -1.

    state["ball"]: column. state["paddle"]: column, int64 (n,). The row of the ball is state["t"].
    """

    action_space = spaces.Discrete(3)
    threshold = 0.95

    def __init__(self, rows: int = 10, columns: int = 5):
        self.rows, self.columns = rows, columns
        self.observation_space = spaces.Box(0.0, 1.0, (rows, columns), np.float32)

    def reset(self, key: Tensor, n: int) -> tuple[State, Tensor]:
        ball = keys.integers(key, (n,), self.columns)
        state = {"ball": ball, "paddle": torch.full_like(ball, self.columns // 2), "t": torch.zeros_like(ball)}
        return state, self.observe(state)

    def step(self, state: State, action: Tensor, key: Tensor) -> Step:
        ball, t = state["ball"], state["t"] + 1
        paddle = (state["paddle"] + action - 1).clamp(0, self.columns - 1)
        state = {"ball": ball, "paddle": paddle, "t": t}
        terminated = t == self.rows - 1
        reward = torch.where(terminated, torch.where(ball == paddle, 1.0, -1.0), 0.0)
        return state, self.observe(state), reward, terminated, self.truncated(t)

    def observe(self, state: State) -> Tensor:
        cells = torch.arange(self.rows * self.columns, device=state["t"].device)
        ball = state["t"] * self.columns + state["ball"]
        paddle = (self.rows - 1) * self.columns + state["paddle"]
        seen = (cells == ball.unsqueeze(-1)) | (cells == paddle.unsqueeze(-1))
        return seen.float().unflatten(-1, (self.rows, self.columns))
