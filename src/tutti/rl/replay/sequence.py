"""A replay whose samples are sequences: runs of consecutive steps, for algorithms with a memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tutti.rl.replay.ring import Number, Ring

Tree = dict[str, Any]


class Sequences(Ring):
    """A ring of `length` steps of n environments. run: steps of a sequence."""

    def __init__(self, length: int, n: int, run: int):
        if length < run:
            raise ValueError(f"a replay of {length} steps of each environment cannot hold sequences of {run}; enlarge "
                             f"buffer_size to at least {run * n}")  # fmt: skip
        super().__init__(length, n)
        self.run = run

    def sample(self, memory: Tree, key: Tensor, count: int, gamma: Number = 1.0) -> tuple[Tree, Tree]:
        """`count` sequences, names as stored, each (run, count, ...), and {"weight": ones (count,)}. gamma: unused,
        as no returns are summed."""
        return self.sequences(memory, key, count, self.run), {"weight": torch.ones(count)}
