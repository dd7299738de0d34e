"""The order of samples: a pure function of (seed, position)."""

from __future__ import annotations

from typing import Any

import numpy as np

from tutti.data.loader import permute

TOGETHER = 8  # blocks that are shuffled into one another


def key(*parts: int) -> np.uint64:
    """64 bits of some numbers, with room for the rounds of `permute`."""
    return np.random.SeedSequence(list(parts)).generate_state(1, np.uint64)[0] >> np.uint64(4)


class Order:
    """The row of each position in an endless stream over `n` rows.

    Every row comes once an epoch, and each epoch has an order of its own.

    shuffle: "rows" shuffles all rows; "blocks" shuffles blocks of rows, and the rows within groups of eight blocks;
        None keeps the order.
    blocks: where the blocks begin, and `n`.
    """

    def __init__(self, n: int, seed: tuple[int, ...], shuffle: str | None, blocks: np.ndarray | None = None):
        if n < 1:
            raise ValueError("a source without rows has no order; remove it, or check its path")
        if shuffle not in ("rows", "blocks", None):
            raise ValueError(f"shuffle is {shuffle!r}; it must be 'rows', 'blocks' or None")
        if shuffle == "blocks" and blocks is None:
            raise ValueError("shuffle='blocks' needs a source with blocks, such as Parquet; use 'rows'")
        self.n, self.seed, self.shuffle = n, seed, shuffle
        self.blocks: Any = blocks
        self._groups: tuple[int, np.ndarray, np.ndarray] | None = None  # of an epoch

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """The rows at some positions, int64."""
        epochs, places = np.divmod(np.asarray(positions, np.int64), self.n)
        if self.shuffle is None:
            return places
        chosen = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            if self.shuffle == "rows":
                chosen[here] = permute(places[here], self.n, key(*self.seed, int(epoch)))
            else:
                chosen[here] = [self._in_blocks(int(epoch), int(place)) for place in places[here]]
        return chosen

    def _in_blocks(self, epoch: int, place: int) -> int:
        if self._groups is None or self._groups[0] != epoch:
            count = len(self.blocks) - 1
            order = permute(np.arange(count), count, key(*self.seed, epoch, 0))
            sizes = np.diff(self.blocks)[order]
            self._groups = epoch, order, np.concatenate([[0], np.cumsum(sizes)])
        _, order, starts = self._groups
        edges = starts[[*range(0, len(order), TOGETHER), len(order)]]
        group = int(np.searchsorted(edges, place, side="right")) - 1
        first, size = int(edges[group]), int(edges[group + 1] - edges[group])
        inside = first + int(permute(np.array([place - first]), size, key(*self.seed, epoch, 1 + group))[0])
        block = int(np.searchsorted(starts, inside, side="right")) - 1
        return int(self.blocks[order[block]]) + inside - int(starts[block])
