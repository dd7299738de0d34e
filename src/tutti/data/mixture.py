"""Several sources in given proportions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tutti.data.loader import permute
from tutti.data.order import key
from tutti.data.sources.open import open_source

BLOCK = 10_000


class Mixture:
    """A weighted mixture of sources, endless: a source that is exhausted begins its next epoch.

    sources: source (or whatever `open_source` takes) -> weight; or pairs of both, for what cannot be a key.

    Every block of 10,000 samples has each source in exactly its proportion (rounded to 1/10,000), in an order of
    its own. Which source gives sample k, and which of its samples it is, is a function of (seed, k).

    >>> mixture = Mixture([([{"x": 1}], 3), ([{"x": 2}], 1)])
    >>> mixture.weights
    (0.75, 0.25)
    """

    def __init__(self, sources: Mapping[Any, float] | Iterable[tuple[Any, float]]):
        pairs = list(sources.items() if isinstance(sources, Mapping) else sources)
        if not pairs:
            raise ValueError("a mixture of no sources")
        weights = [weight for _, weight in pairs]
        if bad := [w for w in weights if not (np.isfinite(w) and w > 0)]:
            raise ValueError(f"a weight is {bad[0]}; weights are positive numbers")
        self.sources = tuple(open_source(source) for source, _ in pairs)
        self.weights = tuple(weight / sum(weights) for weight in weights)
        self.counts = _counts(self.weights)
        self._block: tuple[int, int, np.ndarray, np.ndarray] | None = None

    def places(self, seed: int, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each sample: the number of its source, and how many samples of that source are before it."""
        if len(self.sources) == 1:
            return np.zeros(len(samples), np.int64), np.asarray(samples, np.int64)
        number, turn = np.empty(len(samples), np.int64), np.empty(len(samples), np.int64)
        blocks, inside = np.divmod(np.asarray(samples, np.int64), BLOCK)
        for block in np.unique(blocks):
            here = blocks == block
            if self._block is None or self._block[:2] != (seed, int(block)):
                self._block = seed, int(block), *self._draw_block(seed, int(block))
            number[here], turn[here] = self._block[2][inside[here]], self._block[3][inside[here]]
        return number, turn

    def _draw_block(self, seed: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        edges = np.cumsum(self.counts)
        numbers = np.searchsorted(edges, permute(np.arange(BLOCK), BLOCK, key(seed, 1, block)), side="right")
        turns = np.empty(BLOCK, np.int64)
        for source, count in enumerate(self.counts):
            turns[numbers == source] = block * count + np.arange(count)
        return numbers, turns


def _counts(weights: tuple[float, ...]) -> np.ndarray:
    """Samples of each source in a block, by largest remainders."""
    exact = np.array(weights) * BLOCK
    counts = np.floor(exact).astype(np.int64)
    more = np.argsort(-(exact - counts), kind="stable")[: BLOCK - counts.sum()]
    counts[more] += 1
    if (counts == 0).any():
        raise ValueError(f"the weight {min(weights):.2g} of the total is below 1/{BLOCK}; raise it")
    return counts
