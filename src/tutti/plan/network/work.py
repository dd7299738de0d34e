"""Work: a deterministic clock for the search.

It counts the work of a search in nominal seconds, so that the result does not depend on the machine's load.
A nominal second is roughly what the work takes on one idle core of 2024.
"""

from __future__ import annotations

from dataclasses import dataclass

CAPTURED = 3.5e-4  # seconds to capture a node of a step
SIMULATED = 4e-4  # seconds to lower and simulate a node
CUT = 1e-4  # seconds per node to cut a step into the parts of a pipeline, and to find which of them are equal
ESTIMATED = 2e-6  # seconds to estimate a named plan in closed form
STATE = 4e-5  # seconds to price a state of a cost network
SWEPT, PAIR = 5e-9, 1e-5  # seconds of a sweep: per table entry, and per pair
SOLVED = 3e-5  # seconds per entry of an integer program


@dataclass
class WorkClock:
    """Accumulates the nominal seconds of the work done so far."""

    seconds: float = 0.0

    def capture(self, nodes: int) -> None:
        self.seconds += CAPTURED * nodes

    def simulate(self, nodes: int, share: float = 1.0) -> None:
        """Count the simulation of a step of so many nodes. share: fraction of them that are in unequal parts of it."""
        self.seconds += SIMULATED * nodes * share

    def cut(self, nodes: int) -> None:
        self.seconds += CUT * nodes

    def estimate(self, plans: int) -> None:
        self.seconds += ESTIMATED * plans

    def price(self, states: int) -> None:
        self.seconds += STATE * states

    def sweep(self, pairs: int, entries: int, times: int) -> None:
        """Count `times` sweeps over a cost network with this number of pairs and table entries."""
        self.seconds += times * (PAIR * pairs + SWEPT * entries)

    def solve(self, entries: int) -> None:
        self.seconds += SOLVED * entries
