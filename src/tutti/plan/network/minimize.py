"""The cheapest assignment of a cost network, with a bound on how much cheaper another could be.

Variables with few neighbours are eliminated exactly (`plan.network.eliminate`). On the remaining core a dual bound
rises and the cost of the best assignment falls (`plan.network.bound`). States that cannot be part of a cheaper
assignment are dropped, which allows more eliminations. This repeats until bound and cost meet, or until the core is
small enough for an integer program (`plan.network.exact`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tutti.plan.network.bound import Dual
from tutti.plan.network.eliminate import eliminate, improve
from tutti.plan.network.exact import solve
from tutti.plan.network.network import NEVER, Network, Table
from tutti.plan.network.work import WorkClock

SWEEPS = 20  # dual sweeps per iteration
SMALL, LARGE = 20_000, 100_000  # table entries for an integer program: at once, and if sweeps no longer help
CLOSE = 1e-9  # relative gap that counts as zero
PATIENT = 32  # an iteration stalls if it shrinks the gap by less than 1 / PATIENT of it
STALLS = 3  # stalls after which a core that is too large for an integer program is given up
IMPROVED = 2  # improvements of an assignment per iteration
NEAR = (1 / 2, 1 / 8, 1 / 64, 1 / 512)  # shares of the gap: only states within them are tried after a stall


@dataclass(frozen=True)
class NetworkSolution:
    """States by variable, their cost, and a lower bound of the cost of any assignment."""

    states: dict[str, int]
    cost: float
    bound: float

    @property
    def gap(self) -> float:
        """The maximum relative improvement that another assignment could have."""
        return max(0.0, (self.cost - self.bound) / self.cost) if self.cost else 0.0


def minimize(
    network: Network, seconds: float = 60.0, close: float = CLOSE, work: WorkClock | None = None
) -> NetworkSolution:
    """The cheapest assignment found.

    seconds: budget of nominal seconds of work, which is added to `work`.
    close: relative gap that is accepted.

    Raises ValueError if every assignment is impossible.
    """
    work = work or WorkClock()
    solution = _minimize(network, work, work.seconds + seconds, close)
    if solution.cost >= NEVER / 2:
        raise ValueError("no combination of choices is possible")
    return solution


def _minimize(network: Network, work: WorkClock, deadline: float, close: float) -> NetworkSolution:
    smaller = eliminate(network)
    core = smaller.core
    if not core.unary:
        states = smaller.extend({})
        cost = network.cost(states)
        return NetworkSolution(states, cost, cost)
    dual, bound, late, draw = Dual.of(core), -np.inf, False, np.random.default_rng(0)
    best, stalls = dual.decode(core), 0
    cost = core.cost(best)
    while cost - bound > close * abs(cost):
        for i in range(SWEEPS):
            dual.sweep(backwards=i % 2 == 1)
        work.sweep(len(dual.pairs), _entries(core, {}), SWEEPS)
        before, bound = cost - bound, max(bound, dual.bound)
        best, cost = _cheaper(core, best, dual.decode(core), draw)
        least, late = dual.least(), work.seconds > deadline
        stalled = before - (cost - bound) < (cost - bound) / PATIENT
        if stalled and not late:  # perhaps the assignment is far from optimal: try states near the bound
            for share in NEAR:
                near = _within_bound(least, bound + share * (cost - bound), best)
                if _entries(core, near) <= SMALL:
                    best, cost = _cheaper(core, best, _among(core, near, work, deadline, close).states, draw)
                    break
        within_bound = _within_bound(least, cost, best)
        entries, whole = _entries(core, within_bound), _entries(core, {})
        stalls += stalled
        if late or (stalls >= STALLS and entries > LARGE and 4 * entries > whole):
            break
        if entries <= SMALL or (stalled and entries <= LARGE) or 4 * entries < whole:
            rest = _among(core, within_bound, work, deadline, close)
            best, cost = _cheaper(core, best, rest.states, draw)
            bound = min(cost, max(bound, rest.bound))
            break
    states = smaller.extend(best)
    return NetworkSolution(states, network.cost(states), min(bound, cost) + smaller.constant)


def _among(
    core: Network, state_indices: Mapping[str, Table], work: WorkClock, deadline: float, close: float
) -> NetworkSolution:
    """The cheapest assignment found among these states."""
    network = core.restricted(state_indices)
    if _entries(network, {}) > SMALL and 4 * _entries(network, {}) < _entries(core, {}):
        rest = _minimize(network, work, deadline, close)
    else:
        work.solve(_entries(network, {}))
        states, bound = solve(network, close)
        states = states or dict.fromkeys(network.unary, 0)
        rest = NetworkSolution(states, network.cost(states), bound)
    return NetworkSolution(
        {name: int(state_indices[name][s]) for name, s in rest.states.items()}, rest.cost, rest.bound
    )


def _within_bound(least: Mapping[str, Table], below: float, best: Mapping[str, int]) -> dict[str, Table]:
    """The states that can be part of an assignment that costs less than `below`, and those of the best assignment."""
    below -= CLOSE * abs(below)
    return {name: np.union1d(np.flatnonzero(costs < below), [best[name]]) for name, costs in least.items()}


def _entries(core: Network, states: Mapping[str, Table]) -> int:
    """The total size of the tables of pairs, restricted to these states."""
    counts = {name: len(states.get(name, costs)) for name, costs in core.unary.items()}
    return sum(counts[u] * counts[v] for u, v in core.edges())


def _cheaper(
    core: Network, best: dict[str, int], other: dict[str, int], draw: np.random.Generator
) -> tuple[dict[str, int], float]:
    """The cheaper of two assignments after local improvement, with its cost."""
    x, cost = min(((x, core.cost(x)) for x in (best, improve(core, other, draw))), key=lambda pair: pair[1])
    for _ in range(IMPROVED):
        other = improve(core, x, draw)
        x, cost = min((x, cost), (other, core.cost(other)), key=lambda pair: pair[1])
    return x, cost
