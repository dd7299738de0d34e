"""Deep sea: a reward that random actions hardly ever find (Osband et al. 2019; bsuite's `deep_sea`)."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from tutti.rl.core import keys
from tutti.rl.core.env import Env, State, Step


class DeepSea(Env):
    """Observation: the cell of a grid of size x size, one-hot, (size, size). Actions: 0 and 1.

    Each step goes down by one row, and to the left or to the right: which action does which is drawn for each cell from
    `seed`. A step to the right costs 0.01 / size; one from the last cell of the last row returns 1. The episode
    terminates below the last row. The best return is 0.99; one in 2^size random episodes earns it.

    state["column"]: int64 (n,). The row is state["t"].
    """

    action_space = spaces.Discrete(2)

    def __init__(self, size: int = 10, seed: int = 0):
        if size < 2:
            raise ValueError(f"DeepSea: size is {size}; it must be at least 2")
        self.size, self.threshold = size, 0.95
        self.right = keys.integers(keys.make(seed), (size * size,), 2).numpy()  # the action that goes right
        self.observation_space = spaces.Box(0.0, 1.0, (size, size), np.float32)

    def reset(self, key: Tensor, n: int) -> tuple[State, Tensor]:
        column = torch.zeros(n, dtype=torch.int64, device=key.device)
        return {"column": column, "t": torch.zeros_like(column)}, self.observe(column, column)

    def step(self, state: State, action: Tensor, key: Tensor) -> Step:
        column, row = state["column"], state["t"]
        right = action == torch.tensor(self.right, device=action.device)[row * self.size + column]
        at_treasure = right & (column == self.size - 1)
        reward = at_treasure.float() - (0.01 / self.size) * right
        column, t = torch.where(right, column + 1, column - 1).clamp(0, self.size - 1), row + 1
        return {"column": column, "t": t}, self.observe(t, column), reward, t == self.size, self.truncated(t)

    def observe(self, row: Tensor, column: Tensor) -> Tensor:
        """Zeros below the last row."""
        cells = torch.arange(self.size**2, device=row.device)
        return ((row * self.size + column).unsqueeze(-1) == cells).float().unflatten(-1, (self.size, self.size))
