"""A lower bound of a cost network, and a good assignment, by block-coordinate ascent on its dual relaxation.

Costs are moved between variables and pairs, which changes no assignment's cost; then

    bound = sum_v min unary[v] + sum_(u,v) min pair[u,v]

and every assignment with state s of v costs at least bound + unary[v][s] - min unary[v]. The moves are the handshakes
of MPLP++ (Tourani, Shekhovtsov, Rother and Savchynskyy 2018): a pair takes the costs of its two variables and returns
as much as possible to each. The bound never falls.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tutti.plan.network.network import Network, Table


@dataclass
class Dual:
    """The reparametrized costs of a network."""

    unary: dict[str, Table]
    pairs: dict[tuple[str, str], Table]

    @staticmethod
    def of(network: Network) -> Dual:
        unary = {name: costs.copy() for name, costs in network.unary.items()}
        return Dual(unary, {(u, v): network.pairs[u][v].copy() for u, v in network.edges()})

    @property
    def bound(self) -> float:
        return float(sum(t.min() for t in self.unary.values()) + sum(t.min() for t in self.pairs.values()))

    def sweep(self, backwards: bool) -> None:
        """One handshake of every pair."""
        for u, v in reversed(self.pairs) if backwards else self.pairs:
            both = self.pairs[u, v]
            both += self.unary[u][:, None]
            both += self.unary[v][None, :]
            first, second = (u, v) if backwards else (v, u)
            half = both.min(self._axis(v, first)) / 2
            both -= self._along(v, first, half)
            whole = both.min(self._axis(v, second))
            both -= self._along(v, second, whole)
            rest = both.min(self._axis(v, first))
            both -= self._along(v, first, rest)
            self.unary[first], self.unary[second] = half + rest, whole

    @staticmethod
    def _axis(v: str, variable: str) -> int:
        """The axis of a pair (u, v) to minimize over, leaving one value per state of `kept`."""
        return 0 if variable == v else 1

    @staticmethod
    def _along(v: str, name: str, costs: Table) -> Table:
        return costs[None, :] if name == v else costs[:, None]

    def least(self) -> dict[str, Table]:
        """For each state of each variable, a lower bound of the cost of all assignments with it."""
        least = {name: costs - costs.min() for name, costs in self.unary.items()}
        for (u, v), both in self.pairs.items():
            low = both.min()
            least[u] += both.min(1) - low
            least[v] += both.min(0) - low
        bound = self.bound
        return {name: bound + more for name, more in least.items()}

    def decode(self, network: Network) -> dict[str, int]:
        """An assignment: each variable takes its cheapest state by the moved costs, given the previous ones."""
        x: dict[str, int] = {}
        for name in network.unary:
            costs = self.unary[name].copy()
            for other in network.pairs[name]:
                pair = self.pairs.get((name, other))
                both = self.pairs[other, name].T if pair is None else pair
                costs += both[:, x[other]] if other in x else (both + self.unary[other]).min(1)
            x[name] = int(np.argmin(costs))
        return x
