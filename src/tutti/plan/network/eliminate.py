"""Exact elimination of variables with at most two neighbours from a cost network.

    none:               constant     += min_s unary[v][s]
    one neighbour u:    unary[u][i]  += min_s (unary[v][s] + pair[v,u][s,i])
    two, u and w:       pair[u,w][i,j] += min_s (unary[v][s] + pair[v,u][s,i] + pair[v,w][s,j])

The optimum does not change (rules R1 and R2 of Scholz and Eckstein 2002). Views, casts and pointwise operators between
two others are eliminated in this way, so the size of the core does not depend on them.

A variable with more neighbours can be fixed to a state instead, which leaves each neighbour one neighbour less. This
improves an assignment: the variables that are not fixed take their jointly optimal states (`improve`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tutti.plan.network.network import NEVER, Network, Table

MOST, FEW = 1 << 29, 1 << 21  # maximum additions to eliminate a variable, when solving and when improving
AT_ONCE = 1 << 15  # maximum additions of a min-plus product in one array, which stays in a cache


class Eliminated:
    """A network without the eliminated variables, and the tables that recover their states."""

    def __init__(self, network: Network):
        self.core = network.copy()
        self.constant = 0.0  # minimum cost of eliminated variables without neighbours
        self.steps: list[tuple[str, Table, dict[str, Table]]] = []
        self.fixed: dict[str, int] = {}
        self.additions = {name: _additions(self.core, name) for name in self.core.unary}

    def cheapest(self, most: float) -> str | None:
        """The variable whose elimination takes the fewest additions; None if these exceed `most`."""
        name = min(self.additions, key=self.additions.__getitem__)
        return name if self.additions[name] <= most else None

    def eliminate(self, name: str) -> None:
        core = self.core
        unary, others = core.unary[name], dict(core.pairs[name])
        self.steps.append((name, unary, others))
        self._remove(name)
        if len(others) == 1:
            ((u, both),) = others.items()
            core.add(u, (unary[:, None] + both).min(0))
        elif others:
            u, w = others
            core.join(u, w, np.minimum(min_plus(others[u].T + unary, others[w]), NEVER))
        else:
            self.constant += float(unary.min())
        self._count(others)

    def fix(self, name: str, state: int) -> None:
        others = dict(self.core.pairs[name])
        self.fixed[name] = state
        self.constant += float(self.core.unary[name][state])
        self._remove(name)
        for other, both in others.items():
            self.core.add(other, both[state])
        self._count(others)

    def extend(self, x: Mapping[str, int]) -> dict[str, int]:
        """The best states of the eliminated variables, given those of the core."""
        states = {**x, **self.fixed}
        for name, unary, pairs in reversed(self.steps):
            states[name] = int(np.argmin(unary + sum((table[:, states[other]] for other, table in pairs.items()), 0.0)))
        return states

    def _remove(self, name: str) -> None:
        self.core.remove(name)
        del self.additions[name]

    def _count(self, names: Mapping[str, Table]) -> None:
        self.additions |= {name: _additions(self.core, name) for name in names}


def eliminate(network: Network) -> Eliminated:
    """Eliminate the cheapest variable until all others have three neighbours or too large tables."""
    eliminated = Eliminated(network)
    while eliminated.additions and (name := eliminated.cheapest(MOST)):
        eliminated.eliminate(name)
    return eliminated


def improve(network: Network, x: Mapping[str, int], random: np.random.Generator) -> dict[str, int]:
    """An assignment that costs no more: a few random variables with many neighbours keep their states."""
    eliminated = Eliminated(network)
    luck = {name: random.random() for name in network.unary}
    while eliminated.additions:
        if name := eliminated.cheapest(FEW):
            eliminated.eliminate(name)
        else:
            name = max(eliminated.additions, key=lambda name: luck[name] * len(eliminated.core.pairs[name]) ** 2)
            eliminated.fix(name, x[name])
    return eliminated.extend({})


def min_plus(a: Table, b: Table) -> Table:
    """The min-plus product of a (i, s) and b (s, j): the minimum of a[i, s] + b[s, j] over s, of shape (i, j)."""
    if a.size * b.shape[1] <= AT_ONCE:
        return (a[:, :, None] + b).min(1)
    if a.shape[0] > b.shape[1]:
        return min_plus(b.T, a.T).T
    out, b, sums = np.empty((a.shape[0], b.shape[1])), np.ascontiguousarray(b), np.empty(b.shape)
    for i, row in enumerate(a):
        np.add(b, row[:, None], out=sums)
        np.min(sums, axis=0, out=out[i])
    return out


def _additions(network: Network, name: str) -> float:
    others = network.pairs[name]
    if len(others) > 2:
        return np.inf
    size = float(len(network.unary[name]))
    for other in others:
        size *= len(network.unary[other])
    return size
