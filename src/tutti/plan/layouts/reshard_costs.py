"""Costs of moving a tensor from each of many layouts to each of many others, computed together.

The collective of each axis follows from the two placements:

| from | to | collective |
|---|---|---|
| replicate | split | none: a slice |
| replicate | partial sum | none: zeros on all ranks but one |
| partial | split | reduce-scatter |
 split | split of another dim, or of the same dim at another position | all-to-all |
| partial | replicate | all-reduce |
| split | replicate, or a partial sum | all-gather |

in this order: collectives that shrink the tensor come first. Among equals, outer axes, whose links are slower, send
least. The bytes that an axis sends depend on what the other axes did before. If an axis splits a dim at a position that
another axis must leave first, it waits: a slice is applied later, a reduce-scatter becomes an all-reduce and a slice,
and an all-to-all becomes an all-gather and a slice. With few exceptions this is the path that `plan.layouts.reshard`
finds.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tutti.plan.layouts.layout import Mesh, Partial, Split
from tutti.plan.layouts.options import PLACEMENTS
from tutti.plan.network.network import NEVER

KINDS = ("", "mask", "slice", "reduce_scatter", "all_to_all", "later slice", "all_reduce", "all_gather", "last slice")
STAY, MASK, SLICE, SCATTER, TO_ALL, LATER, REDUCE, GATHER, LAST, IMPOSSIBLE = range(len(KINDS) + 1)

Price = Callable[[str, str, int], float]  # seconds of (kind, axis, local bytes before the collective)


class Moves:
    """Tables of the costs of moves on one mesh."""

    def __init__(self, mesh: Mesh, price: Price):
        self.mesh, self.price = mesh, price
        self.axes = list(mesh.items())
        self.kinds = np.zeros((0, 0), dtype=np.int8)
        self.prices_of: dict[tuple, float] = {}

    def table(self, source: np.ndarray, target: np.ndarray, size: int) -> np.ndarray:
        """Seconds of the move from each layout in `source` (n, axes) to each in `target` (m, axes), of shape (n, m).

        Impossible moves cost `NEVER`. size: bytes of the unsplit tensor.
        """
        kinds, through = self._ways(source, target)
        before = [np.where(self.dim[source[:, a]] >= 0, k, 1)[:, None] for a, (_, k) in enumerate(self.axes)]
        total = np.zeros((len(source), len(target)))
        for a, (axis, _) in enumerate(self.axes):
            parts = np.broadcast_to(before[a], total.shape)
            for b in range(len(self.axes)):
                if b != a:
                    outer_first = (b < a) == (kinds[a] != SCATTER)
                    first = (kinds[b] < kinds[a]) | ((kinds[b] == kinds[a]) & outer_first)
                    parts = parts * np.where(first, through[b], before[b])
            for kind in (MASK, SCATTER, TO_ALL, REDUCE, GATHER):
                where = kinds[a] == kind
                if where.any():
                    total[where] += self._prices(KINDS[kind], axis, size, parts[where])
            total[kinds[a] == IMPOSSIBLE] = NEVER
        return np.minimum(total, NEVER)

    def gathers(self, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Whether each of these moves gathers along some axis, of shape (n, m)."""
        return np.any([kind == GATHER for kind in self._ways(source, target)[0]], axis=0)

    def parts(self, layouts: np.ndarray) -> np.ndarray:
        """The number of ranks that each of these layouts (n, axes) splits a tensor over."""
        self._learn()
        return np.prod([np.where(self.dim[layouts[:, a]] >= 0, k, 1) for a, (_, k) in enumerate(self.axes)], axis=0)

    def _ways(self, source: np.ndarray, target: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Per axis, an array (n, m) of kinds and one of the number of parts between its collective and its slice."""
        self._learn()
        old = [source[:, a][:, None] for a in range(len(self.axes))]
        new = [target[:, a][None, :] for a in range(len(self.axes))]
        plain = [self.kinds[p, q] for p, q in zip(old, new, strict=True)]
        leaves = [p != q for p, q in zip(old, new, strict=True)]
        waits_for = [
            [self._overlap(p, n, q, k) & leave for (_, n), p, leave in zip(self.axes, old, leaves, strict=True)]
            for (_, k), q in zip(self.axes, new, strict=True)
        ]
        kinds, through = [kind.copy() for kind in plain], []
        for kind, waits in zip(kinds, waits_for, strict=True):
            waiting = np.any(waits, axis=0)
            kind[(kind == SCATTER) & waiting] = REDUCE
            kind[(kind == TO_ALL) & waiting] = GATHER
        for a, (_, k) in enumerate(self.axes):
            gathered = np.any([wait & (kinds[b] == GATHER) for b, wait in enumerate(waits_for[a])], axis=0)
            sequence_chunks = plain[a] == SLICE
            kinds[a][sequence_chunks & np.any(waits_for[a], axis=0)] = LATER
            kinds[a][sequence_chunks & gathered] = LAST
            whole = (kinds[a] == GATHER) | (kinds[a] == REDUCE)
            through.append(np.where(whole | (self.dim[new[a]] < 0), 1, k))
        return kinds, through

    def _overlap(self, old: np.ndarray, k: int, new: np.ndarray, n: int) -> np.ndarray:
        """Whether a split over k and a new one over n use the same digits of a dim."""
        dims = (self.dim[old] == self.dim[new]) & (self.dim[new] >= 0)
        return dims & (self.outer[old] < self.outer[new] * n) & (self.outer[new] < self.outer[old] * k)

    def _prices(self, kind: str, axis: str, size: int, parts: np.ndarray) -> np.ndarray:
        """Seconds for a tensor of `size` bytes in each of these numbers of parts."""
        frequency = np.bincount(parts)  # few distinct numbers of parts, many moves
        prices = np.zeros(len(frequency))
        for n in np.flatnonzero(frequency):
            key = kind, axis, size / n
            if key not in self.prices_of:
                self.prices_of[key] = self.price(kind, axis, int(size / n))
            prices[n] = self.prices_of[key]
        return prices[parts]

    def _learn(self) -> None:
        """Tabulate the placements that the codes stand for."""
        if len(self.kinds) < len(PLACEMENTS):
            self.kinds = np.array([[_kind(p, q) for q in PLACEMENTS] for p in PLACEMENTS], dtype=np.int8)
            self.dim = np.array([p.dim if isinstance(p, Split) else -1 for p in PLACEMENTS])
            self.outer = np.array([p.outer if isinstance(p, Split) else 1 for p in PLACEMENTS])


def _kind(source, target) -> int:
    if source == target:
        return STAY
    if isinstance(source, Partial):
        return IMPOSSIBLE if isinstance(target, Partial) else SCATTER if isinstance(target, Split) else REDUCE
    if isinstance(target, Partial) and target != Partial("sum"):
        return IMPOSSIBLE
    if isinstance(source, Split):
        return TO_ALL if isinstance(target, Split) else GATHER
    return SLICE if isinstance(target, Split) else MASK
