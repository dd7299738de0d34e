"""Pairs with parameters of their own, at any distance: the scaled 1-4 pairs of force fields.

4 epsilon ((sigma / r)^12 - (sigma / r)^6) + k qq / r of nearest images. Such pairs must be among the exclusions of the
other terms.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tutti.science.mol.terms.bonded import Bonded, distance
from tutti.science.mol.terms.lennard_jones import pair_energy
from tutti.science.mol.units import MD


class SpecialPairs(Bonded):
    """sigma, epsilon and the product of charges of atoms (B, 2).

    >>> pairs = SpecialPairs([[0, 3]], sigma=0.3, epsilon=0.4, charge_product=0.5 * 0.2 * -0.1)
    """

    name, size, parameters = "special_pairs", 2, ("sigma", "epsilon", "charge_product")
    kind = "special_pairs"
    sigma: Tensor
    epsilon: Tensor
    charge_product: Tensor

    def __init__(
        self, atoms: Any, sigma: Any, epsilon: Any, charge_product: Any = 0.0, coulomb: float = MD.coulomb
    ) -> None:
        super().__init__(atoms, sigma=sigma, epsilon=epsilon, charge_product=charge_product)
        self.coulomb = float(coulomb)
        self.energies = ("lennard_jones_14", "coulomb_14")

    def form(self, d: list[Tensor]) -> Tensor:
        r = distance(d[0])
        return pair_energy(r, self.sigma, self.epsilon) + self.coulomb * self.charge_product / r

    def kernel_parameters(self) -> list[Tensor]:
        return [self.sigma, self.epsilon, self.coulomb * self.charge_product]
