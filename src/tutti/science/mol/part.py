"""What one process has of a simulation that several share: the atoms that it owns, and copies of those near them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """A potential divided by it computes each of its contributions in one process of all.

    numbers: numbers (n), int64, of the atoms here among those of all processes, the `owned` ones first. atoms: number
    of atoms of all processes. first: whether this process counts what belongs to no atom. add_up: function that sums a
    tensor over the processes, in place.
    """

    numbers: Tensor
    owned: int
    atoms: int
    first: bool
    add_up: Callable[[Tensor], None]

    @cached_property
    def place(self) -> Tensor:
        """(atoms) int64: where an atom is here, -1 if it is not."""
        place = torch.full((self.atoms,), -1, dtype=torch.int64)
        place[self.numbers] = torch.arange(len(self.numbers))
        return place

    def of_atoms(self, values: Tensor, what: str) -> Tensor:
        """Values (atoms, ...) of the atoms here."""
        if len(values) != self.atoms:
            raise ValueError(f"there are {what} for {len(values)} atoms, but there are {self.atoms}")
        return values[self.numbers]

    def rows(self, tuples: Tensor) -> Tensor:
        """(B) bool: the tuples (B, size) of which this process owns the first atom."""
        first = self.place[tuples[:, 0]]
        return (first >= 0) & (first < self.owned)

    def tuples(self, tuples: Tensor, what: str) -> Tensor:
        """Tuples of atoms, whose first one is owned, by their places here. Raises ValueError if an atom is not here."""
        places = self.place[tuples]
        if bool((missing := (places < 0).any(-1)).any()):
            raise ValueError(
                f"the {what} of atoms {tuples[missing][0].tolist()} reach farther than the cutoff and its skin, so that"
                " no process has all of them; take a longer cutoff or fewer processes"
            )
        return places

    def pairs(self, pairs: Tensor) -> Tensor:
        """Those pairs (X, 2) of which both atoms are here, by their places."""
        places = self.place[pairs]
        return places[(places >= 0).all(-1)]
