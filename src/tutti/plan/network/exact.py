"""A cost network as an integer program, for HiGHS.

For every variable v and state s let x[v,s] in {0,1}; for every pair y[u,v,s,t] >= 0:

    sum_s x[v,s] = 1                                             `_Program.variable`
    sum_t y[u,v,s,t] = x[u,s]      sum_s y[u,v,s,t] = x[v,t]     `_Program.pair`

    minimize  sum unary[v][s] x[v,s] + sum pair[u,v][s,t] y[u,v,s,t]
"""

from __future__ import annotations

import numpy as np

from tutti.plan.network.network import NEVER, Network

UNIT = 1e6  # the solver works in microseconds
NODES = 100  # limit of branch-and-bound nodes, so that the result does not depend on the time


def solve(network: Network, close: float = 1e-9) -> tuple[dict[str, int] | None, float]:
    """The cheapest assignment found (None if none is), and a lower bound of the cost of any assignment.

    close: relative gap that is accepted.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # takes half a second
    from scipy.sparse import csr_array

    program = _Program(network)
    for name in network.unary:
        program.variable(name)
    for u, v in network.edges():
        program.pair(u, v)
    rows, columns, values = (np.concatenate(parts) for parts in zip(*program.entries, strict=True))
    shape = (len(program.right), len(program.cost))
    right = np.array(program.right)
    result = milp(
        np.array(program.cost) * UNIT,
        integrality=np.array(program.integral),
        bounds=Bounds(0, np.inf),
        constraints=LinearConstraint(csr_array((values, (rows, columns)), shape=shape), right, right),  # pyright: ignore
        options={"node_limit": NODES, "mip_rel_gap": close},
    )
    bound = -np.inf if result.mip_dual_bound is None else result.mip_dual_bound / UNIT
    if result.x is None:
        return None, bound
    first = program.first
    return {n: int(np.argmax(result.x[first[n] : first[n] + len(c)])) for n, c in network.unary.items()}, bound


class _Program:
    def __init__(self, network: Network):
        self.network = network
        self.cost: list[float] = []
        self.integral: list[int] = []
        self.right: list[float] = []
        self.entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # rows, columns, coefficients
        self.first: dict[str, int] = {}

    def row(self, columns: np.ndarray, coefficients: np.ndarray, right: float) -> None:
        self.entries.append((np.full(len(columns), len(self.right)), columns, coefficients))
        self.right.append(right)

    def variable(self, name: str) -> None:
        costs = self.network.unary[name]
        self.first[name] = len(self.cost)
        self.cost += costs.tolist()
        self.integral += [1] * len(costs)
        self.row(np.arange(self.first[name], len(self.cost)), np.ones(len(costs)), 1.0)

    def pair(self, u: str, v: str) -> None:
        """Add a pair. Impossible combinations have no column."""
        costs = self.network.pairs[u][v]
        number = np.full(costs.shape, -1)
        possible = costs < NEVER / 2
        number[possible] = len(self.cost) + np.arange(possible.sum())
        self.cost += costs[possible].tolist()
        self.integral += [0] * int(possible.sum())
        for name, numbers in ((u, number), (v, number.T)):
            for s, columns in enumerate(numbers):
                columns = columns[columns >= 0]
                coefficients = np.append(np.ones(len(columns)), -1.0)
                self.row(np.append(columns, self.first[name] + s), coefficients, 0.0)
