"""A sum of classical terms with what belongs to it: constraints and masses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutti.science.mol.part import Part
from tutti.science.mol.potential import Potential, Sum
from tutti.science.mol.system import check_atoms
from tutti.science.mol.terms import PME, Coulomb, Ewald, LennardJones
from tutti.science.mol.units import MD, Units

FAR = 1e5  # a cutoff that no molecule without a cell exceeds, in its unit of length
METHODS = ("none", "cut", "shift", "reaction_field", "ewald", "pme")


class ForceField(Sum):
    """A `Sum` of terms, and distances that are to be held.

    constraints: atoms (C, 2) and lengths (C).
    """

    name = "force_field"

    def __init__(self, terms: Sequence[Potential], constraints: Any = None, lengths: Any = None) -> None:
        super().__init__(terms)
        pairs = torch.zeros(0, 2, dtype=torch.int64) if constraints is None else constraints
        self.constraints = torch.as_tensor(pairs, dtype=torch.int64).reshape(-1, 2)
        self.lengths = torch.as_tensor([] if lengths is None else lengths, dtype=torch.float64)
        if len(self.lengths) != len(self.constraints):
            raise ValueError(f"there are {len(self.lengths)} lengths for {len(self.constraints)} constraints")
        if len(self.constraints):
            check_atoms("constraint", self.constraints, int(self.constraints.max()) + 1)
            if not bool((self.lengths > 0).all()):
                row = int((self.lengths <= 0).nonzero()[0])
                raise ValueError(f"the length of constraint {row} is {float(self.lengths[row])}; it must be positive")

    def divide(self, part: Part) -> ForceField:
        """Constraints go with their first atom; a process owns all atoms that constraints connect."""
        divided = super().divide(part)
        assert isinstance(divided, ForceField)
        rows = part.rows(self.constraints)
        divided.constraints, divided.lengths = part.tuples(self.constraints[rows], "constraint"), self.lengths[rows]
        return divided


@dataclass
class Nonbonding:
    """How Lennard-Jones and Coulomb interactions of a system are computed.

    method: method of electrostatics; 'none' is Coulomb's law without a cutoff, for molecules without a cell. switch:
    distance at which Lennard-Jones begins to be switched off; by default it is cut, with tail corrections. tolerance:
    accuracy of Ewald's sum and PME, see their `accurate`. order: order of PME's splines, by default the fastest.
    dielectric: dielectric constant of the reaction field.
    """

    method: str = "pme"
    cutoff: float = 1.0
    switch: float | None = None
    tail: bool = True
    tolerance: float = 1e-5
    order: int | None = None
    dielectric: float = 78.3
    units: Units = MD

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method {self.method!r} is not known; there are {', '.join(METHODS)}")
        if self.method == "none":
            self.cutoff, self.tail, self.switch = FAR, False, None

    def terms(
        self, charges: Tensor, sigma: Tensor, epsilon: Tensor, cell: Tensor | None, exclusions: Tensor
    ) -> list[Potential]:
        """Terms of charges, sigma and epsilon (N) each; types are found."""
        if cell is None and self.method in ("ewald", "pme"):
            raise ValueError(f"method {self.method!r} needs a periodic cell; use 'none', 'cut' or 'reaction_field'")
        kinds, types = torch.unique(torch.stack([sigma, epsilon], 1), dim=0, return_inverse=True)
        truncation = "cut" if self.switch is None else "switch"
        tail = self.tail and cell is not None
        if len(kinds) == 1:
            types = None
        lj = LennardJones(
            kinds[:, 0], kinds[:, 1], self.cutoff, types, truncation, self.switch, tail, exclusions=exclusions
        )
        if not bool(charges.any()):
            return [lj]
        k = self.units.coulomb
        if self.method in ("ewald", "pme"):
            assert cell is not None
            if self.method == "ewald":
                return [lj, Ewald.accurate(charges, cell, self.cutoff, self.tolerance, k, exclusions)]
            return [lj, PME.accurate(charges, cell, self.cutoff, self.tolerance, self.order, k, exclusions)]
        method = "cut" if self.method == "none" else self.method
        return [lj, Coulomb(charges, self.cutoff, method, self.dielectric, k, exclusions)]
