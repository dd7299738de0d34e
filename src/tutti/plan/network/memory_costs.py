"""The bytes that the choices of a cost network keep in memory (`plan.network.sharding_problem`).

bytes[v][s]     = bytes of inputs, of activations kept for the backward pass, and of gradients kept for the update
bytes[u,v][s,t] = bytes of the result of a move, kept or temporary
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from tutti.plan.layouts.layout import Mesh
from tutti.plan.layouts.reshard_costs import Moves
from tutti.plan.network.network import Network

ALL = slice(None)


@dataclass(frozen=True)
class Version:
    """Bytes of the result of a move between two variables: kept by a view until the backward pass, or temporary."""

    source: str
    reader: str
    saved: int
    passing: int
    produced: np.ndarray
    read: np.ndarray
    parts: np.ndarray

    def bytes(self, source, reader, size: int | None = None) -> np.ndarray:
        """Bytes for these states of the two variables. size: by default the sum of kept and temporary bytes."""
        moved = (self.produced[source][:, None, :] != self.read[reader][None, :, :]).any(-1)
        return moved * ((self.saved + self.passing if size is None else size) / self.parts[reader])


class MemoryTables:
    """Tables of bytes by variable and state.

    inputs: stored tensors. activations: what the forward pass keeps for the backward pass. gradients: what the backward
    pass keeps for the update. versions: results of moves.

    in_flight: microbatches whose activations are kept at once.
    accumulates: whether there are gradients of other microbatches beside the activations of one.
    """

    def __init__(self, moves: Moves, in_flight: float = 1, accumulates: bool = False):
        self.parts, self.in_flight, self.accumulates = moves.parts, in_flight, accumulates
        self.inputs: dict[str, np.ndarray] = {}
        self.activations: dict[str, np.ndarray] = {}
        self.gradients: dict[str, np.ndarray] = {}
        self.versions: list[Version] = []

    def keep(self, table: dict[str, np.ndarray], name: str, size: int, layouts: np.ndarray) -> None:
        """Count `size` bytes in these layouts, one for each state of a variable."""
        table[name] = table.get(name, 0) + size / self.parts(layouts)

    def keep_workspace(self, name: str, size: int, choices: Sequence[Collection[str]], mesh: Mesh) -> None:
        """Count `size` bytes that the forward pass keeps, split over the axes of each state's choices."""
        parts = np.array([prod(mesh[axis] for axis in axes) for axes in choices])
        self.activations[name] = self.activations.get(name, 0) + size / parts

    def version(
        self, source: str, reader: str, saved: int, passing: int, produced: np.ndarray, read: np.ndarray
    ) -> None:
        """Count the result of a move between two variables: one is temporary, and `saved` bytes are kept."""
        self.versions.append(Version(source, reader, saved, passing, produced, read, self.parts(read)))

    def charge(self, network: Network, price: float) -> None:
        """Add a price per byte to the costs of a network."""
        for table, times in self._tables():
            for name, sizes in table.items():
                network.add(name, price * times * sizes)
        for move in self.versions:
            network.join(move.source, move.reader, price * move.bytes(ALL, ALL))

    def total(self, states: Mapping[str, int]) -> tuple[float, float]:
        """The bytes that some states keep: at most at once, and all that `charge` counts."""
        inputs, activations, gradients = (
            times * sum(saved[states[name]] for name, saved in table.items()) for table, times in self._tables()
        )
        moved = [(move, *(np.atleast_1d(states[x]) for x in (move.source, move.reader))) for move in self.versions]
        versions = sum(move.bytes(s, t).item() for move, s, t in moved)
        passing = sum(move.bytes(s, t, move.passing).item() for move, s, t in moved)
        saved = activations + versions - passing
        at_once = inputs + (saved + gradients if self.accumulates else max(saved, gradients))
        return float(at_once), float(inputs + activations + gradients + versions)

    def _tables(self) -> tuple[tuple[dict[str, np.ndarray], float], ...]:
        return (self.inputs, 1), (self.activations, self.in_flight), (self.gradients, 1)
