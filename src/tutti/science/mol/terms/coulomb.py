"""Coulomb pairs within a cutoff: k q_i q_j (1/r + a r^2 - c).

| method | a | c |
|---|---|---|
| cut | 0 | 0 |
| shift | 0 | 1/rc |
| reaction_field | (e - 1) / (2 e + 1) / rc^3 | 3 e / (2 e + 1) / rc |

e is the dielectric constant beyond the cutoff (Tironi et al., J. Chem. Phys. 102, 5451 (1995)); infinity is allowed.
Excluded pairs feel no reaction field either, as in OpenMM.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tutti.science.mol.neighbors import NeighborList, Pairs, unique_pairs
from tutti.science.mol.part import Part
from tutti.science.mol.potential import Potential, copy_without_caches
from tutti.science.mol.system import check_finite
from tutti.science.mol.terms.nonbonded import PairKernel
from tutti.science.mol.units import MD

METHODS = ("cut", "shift", "reaction_field")


class Coulomb(Potential):
    """Coulomb interactions of charges (N) within the cutoff.

    coulomb: energy of two unit charges at unit distance, `Units.coulomb`.

    >>> from tutti.science.mol.system import System
    >>> pair = System([[0.0, 0, 0], [0.5, 0, 0]], charges=[1.0, -1.0])
    >>> term = Coulomb(pair.charges, cutoff=1.0, coulomb=1.0)
    >>> term.evaluate(pair.positions, pair.cell, term.neighbors(pair)).energy
    tensor([-2.], dtype=torch.float64)
    """

    name = "coulomb"
    half = None
    exclusions: Tensor

    def __init__(
        self,
        charges: Any,
        cutoff: float,
        method: str = "cut",
        dielectric: float = 78.3,
        coulomb: float = MD.coulomb,
        exclusions: Any = None,
    ) -> None:
        if method not in METHODS:
            raise ValueError(f"method {method!r} is not known; there are {', '.join(METHODS)}")
        if not 0 < cutoff < math.inf:
            raise ValueError(f"the cutoff {cutoff} of Coulomb pairs must be positive and finite")
        self.charges = torch.as_tensor(charges, dtype=torch.float64)
        check_finite("charges", self.charges)
        self.cutoff, self.method, self.coulomb = float(cutoff), method, float(coulomb)
        self.quadratic, self.constant = 0.0, 1 / cutoff if method == "shift" else 0.0
        if method == "reaction_field":
            e = 1 / dielectric
            self.quadratic, self.constant = (1 - e) / (2 + e) / cutoff**3, 3 / (2 + e) / cutoff
        self.exclusions = unique_pairs(exclusions)

    def energy(self, positions: Tensor, cell: Tensor | None, pairs: Pairs) -> Tensor:
        r = pairs.vectors(positions, cell).norm(dim=-1)
        qq = self.coulomb * self.charges[pairs.i] * self.charges[pairs.j]
        u = torch.where(r < self.cutoff, qq * (1 / r + self.quadratic * r**2 - self.constant), 0.0)
        return pairs.sum(u, positions.shape[0]) * (1 if pairs.half else 0.5)

    @cached_property
    def kernel(self) -> PairKernel:
        return PairKernel(None, self)

    def accumulate(
        self, positions: Tensor, cell: Tensor | None, neighbors: NeighborList, forces: Tensor, virial: Tensor | None
    ) -> dict[str, Tensor]:
        _, energy = self.kernel.add(positions, cell, neighbors, forces, virial)
        return self.add_rest(energy, positions, cell, neighbors, forces, virial)

    def add_rest(
        self, pair_energy: Tensor, positions: Tensor, cell: Tensor | None, neighbors: NeighborList, forces: Tensor,
        virial: Tensor | None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """What there is besides pairs: nothing."""
        return {self.name: pair_energy}

    def divide(self, part: Part) -> Coulomb:
        divided = copy_without_caches(self)
        divided.charges = part.of_atoms(self.charges, "charges")
        divided.exclusions = part.pairs(self.exclusions)
        return divided
