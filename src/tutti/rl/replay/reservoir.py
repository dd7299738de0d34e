"""Reservoir sampling (Vitter 1985): a uniform sample of everything that was ever added.

Row i, counted from 1, replaces a random row with probability size / i.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tutti.rl import keys
from tutti.rl.replay.ring import Shape

Tree = dict[str, Any]


class Reservoir:
    """A memory of `size` rows without order: (size, ...)."""

    def __init__(self, size: int):
        self.size = size

    def init(self, shapes: dict[str, Shape]) -> Tree:
        rows = {name: torch.zeros(self.size, *shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
        return {"rows": rows, "seen": torch.zeros((), dtype=torch.int64)}

    def add(self, memory: Tree, rows: Tree, key: Tensor) -> Tree:
        """The memory after rows (count, ...) more. Writes into the tensors of the memory."""
        count = next(iter(rows.values())).shape[0]
        number = memory["seen"] + torch.arange(count)
        drawn = (keys.uniform(key, (count,)).double() * (number + 1)).long()
        place = torch.where(number < self.size, number, drawn)
        # Of rows for one place the last one counts. Rows without a place, and those overwritten, go to a spare row.
        same = (place.unsqueeze(0) == place.unsqueeze(1)).triu(1).any(-1)
        place = torch.where(same | (place >= self.size), self.size, place)
        for name, x in memory["rows"].items():
            spare = torch.cat([x, x[:1]])
            x.copy_(spare.index_copy(0, place, rows[name].to(x.dtype))[: self.size])
        return {**memory, "seen": memory["seen"] + count}

    def sample(self, memory: Tree, key: Tensor, count: int) -> Tree:
        """`count` rows, drawn with replacement."""
        index = keys.integers(key, (count,), memory["seen"].clamp(max=self.size))
        return {name: x[index] for name, x in memory["rows"].items()}
