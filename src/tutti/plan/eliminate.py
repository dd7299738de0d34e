"""Exact elimination of variables with at most two neighbours from a cost network.

    one neighbour u:    unary[u][i]  += min_s (unary[v][s] + pair[v,u][s,i])
    two, u and w:       pair[u,w][i,j] += min_s (unary[v][s] + pair[v,u][s,i] + pair[v,w][s,j])

The optimum does not change (rules R1 and R2 of Scholz and Eckstein 2002). Followers (views, casts, pointwise
operators between two others) vanish in this way: what is left does not grow with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tutti.plan.network import NEVER, Network, Table

MOST = 1 << 29  # additions that the elimination of one variable may take


@dataclass
class Eliminated:
    """A network without the variables that could be eliminated, and how to find their states again."""

    core: Network
    steps: list[tuple[str, Table, dict[str, Table]]] = field(default_factory=list)

    def extend(self, x: dict[str, int]) -> dict[str, int]:
        """The best states of the eliminated variables, given those of the core."""
        found = dict(x)
        for name, unary, pairs in reversed(self.steps):
            found[name] = int(np.argmin(unary + sum((table[:, found[other]] for other, table in pairs.items()), 0.0)))
        return found


def eliminate(network: Network) -> Eliminated:
    """Eliminate the cheapest variable first, until each that is left has three neighbours or too large tables."""
    made = Eliminated(network.copy())
    core = made.core
    costs = {name: _additions(core, name) for name in core.unary}
    while costs:
        name = min(costs, key=costs.__getitem__)
        if costs[name] > MOST:
            return made
        unary, others = core.unary[name], core.pairs[name]
        made.steps.append((name, unary, dict(others)))
        core.remove(name)
        touched = list(others)
        if len(others) == 1:
            core.add(touched[0], (unary[:, None] + others[touched[0]]).min(0))
        elif others:
            u, w = touched
            core.join(u, w, np.minimum(min_plus(others[u].T + unary, others[w]), NEVER))
        del costs[name]
        costs |= {other: _additions(core, other) for other in touched}
    return made


def min_plus(a: Table, b: Table) -> Table:
    """(i, s) and (s, j) to (i, j): the least of a[i, s] + b[s, j] over s."""
    out = np.empty((a.shape[0], b.shape[1]))
    transposed = np.ascontiguousarray(b.T)
    for i, row in enumerate(a):
        np.min(transposed + row, axis=1, out=out[i])
    return out


def _additions(network: Network, name: str) -> float:
    others = network.pairs[name]
    if len(others) > 2:
        return np.inf
    size = float(len(network.unary[name]))
    for other in others:
        size *= len(network.unary[other])
    return size
