"""The cheapest assignment of a cost network, with a proof of how much cheaper another could be.

Followers are eliminated exactly (`plan.eliminate`). On the core that is left a dual bound rises and an assignment
falls (`plan.bound`); states that cannot be part of a cheaper assignment are dropped, more variables can then be
eliminated, and so on until the two meet or little enough is left for an integer program (`plan.exact`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tutti.plan.bound import Dual, improve
from tutti.plan.eliminate import eliminate
from tutti.plan.exact import solve
from tutti.plan.network import NEVER, Network, Table

SWEEPS = 20  # between two looks at what can be dropped
COLUMNS = 200_000  # what the integer program may have
CLOSE = 1e-9  # relative: no gap
STALLED = 1e-5  # relative: a rise of the bound that is not worth waiting for
NEAR = (1 / 8, 1 / 64, 1 / 512)  # shares of the gap within which states are tried alone
TRIED = 20_000  # entries of tables that such a trial may have


@dataclass(frozen=True)
class Solution:
    """States by variable, their cost, and a lower bound of every assignment's cost."""

    states: dict[str, int]
    cost: float
    bound: float

    @property
    def gap(self) -> float:
        """By how much another assignment could be cheaper, as a share of the cost."""
        return max(0.0, (self.cost - self.bound) / self.cost) if self.cost else 0.0


def minimize(network: Network, seconds: float = 60.0) -> Solution:
    """Raises ValueError where every assignment is impossible."""
    deadline = time.monotonic() + seconds
    found = _minimize(network, deadline)
    if found.cost >= NEVER / 2:
        raise ValueError("no combination of choices is possible")
    return found


def _minimize(network: Network, deadline: float) -> Solution:
    smaller = eliminate(network)
    core = smaller.core
    if not core.unary:
        states = smaller.extend({})
        cost = network.cost(states)
        return Solution(states, cost, cost)
    dual, bound = Dual.of(core), -np.inf
    best = dual.decode(core)
    cost = core.cost(best)
    while True:
        for i in range(SWEEPS):
            dual.sweep(backwards=i % 2 == 1)
        before, bound = bound, max(bound, dual.bound)
        least = dual.least()
        for found in _candidates(core, dual, least, best, bound, cost, deadline):
            if core.cost(found) < cost:
                best, cost = found, core.cost(found)
        if cost - bound <= CLOSE * abs(cost):
            break
        kept = _kept(least, cost, best)
        late = time.monotonic() > deadline
        if _entries(core, kept) < _entries(core, {}) / 4 and not late:
            rest = _minimize(core.restricted(kept), deadline)
            best, cost = _cheaper(core, best, {name: int(kept[name][s]) for name, s in rest.states.items()})
            bound = min(cost, max(bound, rest.bound))
            break
        if late or bound - before < STALLED * abs(bound):
            if _entries(core, kept) <= COLUMNS and not late:
                states, proven = solve(core.restricted(kept), deadline - time.monotonic())
                if states is not None:
                    best, cost = _cheaper(core, best, {name: int(kept[name][s]) for name, s in states.items()})
                bound = min(cost, max(bound, proven))
            break
    states = smaller.extend(best)
    return Solution(states, network.cost(states), bound)


def _candidates(core, dual, least, best, bound, cost, deadline) -> Iterator[dict[str, int]]:
    """Assignments that may be cheaper: by the dual; the best of the states that are nearest to its bound."""
    yield dual.decode(core)
    for share in NEAR:
        kept = _kept(least, bound + share * (cost - bound), best)
        if _entries(core, kept) < min(TRIED, _entries(core, {}) / 4) and time.monotonic() < deadline:
            rest = _minimize(core.restricted(kept), deadline)
            yield {name: int(kept[name][state]) for name, state in rest.states.items()}
            return


def _kept(least: Mapping[str, Table], below: float, best: Mapping[str, int]) -> dict[str, Table]:
    """The states that can be part of an assignment that costs less, and those of the best one."""
    below -= CLOSE * abs(below)
    return {name: np.union1d(np.flatnonzero(costs < below), [best[name]]) for name, costs in least.items()}


def _entries(core: Network, kept: Mapping[str, Table]) -> int:
    """The size of all tables of pairs with these states."""
    states = {name: len(kept.get(name, costs)) for name, costs in core.unary.items()}
    return sum(states[u] * states[v] for u, v in core.edges())


def _cheaper(core: Network, best: dict[str, int], other: dict[str, int]) -> tuple[dict[str, int], float]:
    other = improve(core, other)
    return min(((x, core.cost(x)) for x in (best, other)), key=lambda pair: pair[1])
