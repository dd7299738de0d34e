"""Placement: which things to store outside of the device, so that enough of its memory is free, at least cost.

A thing costs seconds outside and inside. A pair costs seconds if one thing is outside and the other inside. Without a
constraint this is a minimum cut between the two sides. With x(i) = 1 if thing i is outside:

    least  sum out(i) x(i) + in(i) (1 - x(i)) + sum apart(i, j) x(i) (1 - x(j))
    with   sum bytes(i) x(i) >= wanted

A price on memory inside, raised until enough is free, removes the constraint (Lagrange). The cost of such a cut bounds
the cost of all placements from below. Some optimal placements are not cuts at any price. If the best cut costs more
than the bound, an integer program (HiGHS) decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

MOST = 2**30  # sum of all capacities, which are 32-bit integers
PRICES = 60  # bisections of the price
CLOSE = 1e-6

Pairs = Mapping[tuple[int, int], float]  # (outside, inside) -> seconds


@dataclass(frozen=True)
class Thing:
    """bytes: bytes of device memory that it frees when outside. outside, inside: seconds that it costs there."""

    name: str
    bytes: int
    outside: float
    inside: float = 0.0


def cost(things: Sequence[Thing], pairs: Pairs, away: set[int]) -> float:
    """Seconds if the things in `away` are outside."""
    alone = sum(t.outside if i in away else t.inside for i, t in enumerate(things))
    return alone + sum(took for (i, j), took in pairs.items() if i in away and j not in away)


def cut(things: Sequence[Thing], pairs: Pairs, price: float = 0.0) -> set[int]:
    """The things outside in the cheapest placement if a byte inside costs `price` seconds."""
    from scipy.sparse import csr_array  # takes half a second
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    n = len(things)
    source, sink = n, n + 1  # inside, outside
    arcs: dict[tuple[int, int], float] = {}
    for i, t in enumerate(things):
        arcs[source, i], arcs[i, sink] = t.outside, t.inside + price * t.bytes
    for (i, j), took in pairs.items():
        arcs[j, i] = arcs.get((j, i), 0.0) + took
    scale = MOST / (sum(arcs.values()) or 1.0)
    rows, columns = zip(*arcs, strict=True)
    capacity = np.rint(np.array(list(arcs.values())) * scale).astype(np.int32)
    graph = csr_array((capacity, (rows, columns)), shape=(n + 2, n + 2))
    left = graph - maximum_flow(graph, source, sink).flow
    left.data = np.maximum(left.data, 0)
    left.eliminate_zeros()
    inside = set(breadth_first_order(left, source, return_predecessors=False).tolist())
    return set(range(n)) - inside


def place(things: Sequence[Thing], pairs: Pairs, wanted: float) -> set[int]:
    """The things outside in the cheapest placement that frees `wanted` bytes; all things if none does."""
    if not things or wanted > sum(t.bytes for t in things):
        return set(range(len(things)))
    best = cut(things, pairs)
    if _freed(things, best) >= wanted:
        return best
    low, best = 0.0, set(range(len(things)))
    total = cost(things, pairs, best) + cost(things, pairs, set())
    high = total / max(1, min(t.bytes for t in things if t.bytes))  # above the price of any thing
    bound = 0.0
    for _ in range(PRICES):
        price = (low + high) / 2
        offloaded = cut(things, pairs, price)
        on_device = sum(t.bytes for t in things) - _freed(things, offloaded)
        room = sum(t.bytes for t in things) - wanted
        bound = max(bound, cost(things, pairs, offloaded) + price * (on_device - room))
        if _freed(things, offloaded) >= wanted:
            high, best = price, min(best, offloaded, key=lambda away: cost(things, pairs, away))
        else:
            low = price
    if cost(things, pairs, best) <= bound * (1 + CLOSE):
        return best
    return min(best, _exactly(things, pairs, wanted), key=lambda away: cost(things, pairs, away))


def _freed(things: Sequence[Thing], away: set[int]) -> int:
    return sum(things[i].bytes for i in away)


def _exactly(things: Sequence[Thing], pairs: Pairs, wanted: float) -> set[int]:
    """The same by an integer program, with a variable per thing and one per pair (1 if it is separated)."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    n, m = len(things), len(pairs)
    seconds = np.array([t.outside - t.inside for t in things] + list(pairs.values()))
    size = np.array([t.bytes for t in things] + m * [0], dtype=float)
    total = size.sum() or 1.0
    limits = [LinearConstraint(size[None] / total, wanted / total, np.inf)]
    if m:
        entries = [(1.0, k, n + k) for k in range(m)]
        for k, (i, j) in enumerate(pairs):
            entries += [(-1.0, k, i), (1.0, k, j)]
        values, rows, columns = zip(*entries, strict=True)
        limits.append(LinearConstraint(coo_array((values, (rows, columns)), shape=(m, n + m)).tocsc(), 0, np.inf))  # pyright: ignore
    scale = np.abs(seconds).max() or 1.0
    solution = milp(seconds / scale, constraints=limits, integrality=np.ones(n + m), bounds=Bounds(0, 1))
    return set(range(n)) if solution.x is None else {i for i in range(n) if solution.x[i] > 0.5}
