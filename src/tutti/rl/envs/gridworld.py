"""Grid worlds: walk over cells to a goal, past holes; gymnasium's `FrozenLake-v1` is one of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from tutti.rl.core import keys
from tutti.rl.core.env import Env, State, Step
from tutti.rl.envs.canvas import BLACK, GRAY, GREEN, ORANGE, WHITE, tiles

MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))  # left, down, right, up: (rows, columns)
ROOMS = "SFFFF", "FWWFH", "FFFFF", "HWFWF", "FFFFG"
LAKES = {
    4: ("SFFF", "FHFH", "FFFH", "HFFG"),
    8: ("SFFFFFFF", "FFFFFFFF", "FFFHFFFF", "FFFFFHFF", "FFFHFFFF", "FHHFFFHF", "FHFFHFHF", "FFFHFFFG"),
}


class GridWorld(Env):
    """Observation: the cell, one-hot. Action: 0 left, 1 down, 2 right, 3 up; walls and borders hold the walker.

    rows: a letter for each cell: S start (one or more), F free, W wall, H hole, G goal. Holes and goals terminate.
    slip: the probability to move to one of the two sides instead, half of it each.
    goal, hole, step_reward: rewards for the step that reaches a goal or a hole, and for any other.

    state["cell"]: row * columns + column, int64 (n,).
    """

    def __init__(
        self,
        rows: Sequence[str] = ROOMS,
        slip: float = 0.0,
        goal: float = 1.0,
        hole: float = -1.0,
        step_reward: float = -0.01,
        limit: int = 100,
        threshold: float | None = 0.9,
    ):
        widths, letters = {len(row) for row in rows}, "".join(rows)
        if len(widths) != 1 or set(letters) - set("SFWHG") or "S" not in letters:
            raise ValueError(
                f"GridWorld: rows {list(rows)} must have one length, consist of S, F, W, H and G, and have a start S"
            )
        height, width = len(rows), widths.pop()
        self.rows = tuple(rows)
        self.shape, self.slip, self.limit, self.threshold = (height, width), slip, limit, threshold
        self.starts = np.flatnonzero([letter == "S" for letter in letters])
        self.ends = np.array([letter in "GH" for letter in letters])
        self.rewards = np.array([{"G": goal, "H": hole}.get(letter, step_reward) for letter in letters], np.float32)
        self.next = np.empty((len(letters), 4), np.int64)  # the cell that each move leads to
        for cell, (i, j) in enumerate(np.ndindex(height, width)):
            for move, (down, right) in enumerate(MOVES):
                k, l = i + down, j + right  # noqa: E741
                free = 0 <= k < height and 0 <= l < width and rows[k][l] != "W"
                self.next[cell, move] = k * width + l if free else cell
        self.observation_space = spaces.Box(0.0, 1.0, (len(letters),), np.float32)
        self.action_space = spaces.Discrete(4)

    def reset(self, key: Tensor, n: int) -> tuple[State, Tensor]:
        cell = torch.tensor(self.starts, device=key.device)[keys.integers(key, (n,), len(self.starts))]
        return {"cell": cell, "t": torch.zeros_like(cell)}, self.observe(cell)

    def step(self, state: State, action: Tensor, key: Tensor) -> Step:
        if self.slip:
            u = keys.uniform(key, action.shape)
            action = (action + (u < self.slip / 2).long() - (u >= 1 - self.slip / 2).long()) % 4
        table, ends, rewards = (torch.tensor(x, device=action.device) for x in (self.next, self.ends, self.rewards))
        cell, t = table.flatten()[state["cell"] * 4 + action], state["t"] + 1
        return {"cell": cell, "t": t}, self.observe(cell), rewards[cell], ends[cell], self.truncated(t)

    def draw(self, state: State, i: int) -> np.ndarray:
        letters = np.array([list(row) for row in self.rows])
        here = np.arange(letters.size).reshape(letters.shape) == int(state["cell"][i])
        planes = np.stack([here, letters == "G", letters == "H", letters == "W"])
        return tiles(planes, [ORANGE, GREEN, BLACK, GRAY], empty=WHITE)

    def observe(self, cell: Tensor) -> Tensor:
        return (cell.unsqueeze(-1) == torch.arange(len(self.next), device=cell.device)).float()


def frozen_lake(size: int = 4, slippery: bool = True) -> GridWorld:
    """gymnasium's `FrozenLake-v1` (size 4) or `FrozenLake8x8-v1` (size 8), with observations that are one-hot."""
    if size not in LAKES:
        raise ValueError(
            f"frozen_lake: there is no map of size {size}; sizes are {list(LAKES)}, or give GridWorld rows"
        )
    limit, threshold = {4: (100, 0.7), 8: (200, 0.85)}[size]
    return GridWorld(LAKES[size], 2 / 3 if slippery else 0.0, 1.0, 0.0, 0.0, limit, threshold)
