"""Cost networks: variables with a cost for each state, and pairs of variables with a cost for each two states.

    minimize  sum_v unary[v][x_v]  +  sum_(u,v) pair[u,v][x_u, x_v]

An impossible combination costs `NEVER`: finite, so that costs can be subtracted, but more than all other costs
together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

NEVER = 1e9
Table = np.ndarray  # float64
Assignment = Mapping[str, int]


@dataclass
class Network:
    """`pairs[u][v]` is the table of shape (states of u, states of v); `pairs[v][u]` is its transpose."""

    unary: dict[str, Table] = field(default_factory=dict)
    pairs: dict[str, dict[str, Table]] = field(default_factory=dict)

    def add(self, name: str, costs: Table) -> None:
        """Add to the costs of a variable's states. Creates the variable if it does not exist."""
        if name in self.unary:
            self.unary[name] = self.unary[name] + costs
        else:
            self.unary[name], self.pairs[name] = costs, {}

    def join(self, u: str, v: str, costs: Table) -> None:
        """Add to the costs of pairs of states of two variables, which may be the same."""
        if u == v:
            self.add(u, np.diagonal(costs))
        else:
            before = self.pairs[u].get(v)
            self.set(u, v, costs if before is None else before + costs)

    def set(self, u: str, v: str, costs: Table) -> None:
        self.pairs[u][v], self.pairs[v][u] = costs, costs.T

    def edges(self) -> list[tuple[str, str]]:
        """Each pair once."""
        order = {name: i for i, name in enumerate(self.unary)}
        return [(u, v) for u, others in self.pairs.items() for v in others if order[u] < order[v]]

    def remove(self, name: str) -> None:
        for other in self.pairs.pop(name):
            del self.pairs[other][name]
        del self.unary[name]

    def copy(self) -> Network:
        """A copy that shares the tables. Tables are never modified in place."""
        return Network(dict(self.unary), {u: dict(others) for u, others in self.pairs.items()})

    def cost(self, x: Assignment) -> float:
        total = sum(costs[x[name]] for name, costs in self.unary.items())
        return float(total + sum(self.pairs[u][v][x[u], x[v]] for u, v in self.edges()))

    def restricted(self, states: Mapping[str, np.ndarray]) -> Network:
        """The network with only the given states (indices) of each named variable."""
        network = Network()
        for name, costs in self.unary.items():
            network.add(name, costs[states[name]] if name in states else costs)
        for u, v in self.edges():
            table = self.pairs[u][v]
            table = table[states[u]] if u in states else table
            network.set(u, v, table[:, states[v]] if v in states else table)
        return network
