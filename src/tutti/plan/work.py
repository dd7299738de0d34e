"""Work: the clock that a search goes by. It counts what is done, so that a busy machine finds the same plan.

Seconds are nominal: what each kind of work takes on one core that does nothing else (of 2024, about), whatever it
takes here and now.
"""

from __future__ import annotations

from dataclasses import dataclass

CAPTURED = 3.5e-4  # seconds to capture a node of a step
SIMULATED = 4.5e-4  # to lower and simulate one
STATE = 1.2e-4  # to price a state of a cost network
SWEPT, PAIR = 1e-8, 1.5e-5  # to sweep over an entry of its tables, and to begin with a pair
SOLVED = 1e-4  # for an entry of an integer program


@dataclass
class Work:
    """What has been done so far, in nominal seconds."""

    seconds: float = 0.0

    def capture(self, nodes: int) -> None:
        self.seconds += CAPTURED * nodes

    def simulate(self, nodes: int) -> None:
        self.seconds += SIMULATED * nodes

    def price(self, states: int) -> None:
        self.seconds += STATE * states

    def sweep(self, pairs: int, entries: int, times: int) -> None:
        """Sweeps over a cost network with so many pairs, and entries in their tables."""
        self.seconds += times * (PAIR * pairs + SWEPT * entries)

    def solve(self, entries: int) -> None:
        self.seconds += SOLVED * entries
