"""What dynamics needs of a compiled network."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from tutti.science.mol.networks.batch import Batch


class Compiled(Protocol):
    """The result of `compile_for_md`: a network in all that dynamics needs of one."""

    cutoff: float
    units: str
    network: Any  # a copy of what was compiled

    def energy_and_forces(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Energies (B) and forces (A, 3), float64."""
        ...

    def evaluate(self, batch: Batch, half: bool = False, virial: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
        """Energies (B), forces (A, 3), virials -sum r (x) dE/dr (B, 3, 3) or None. half: edges lead one way only."""
        ...
