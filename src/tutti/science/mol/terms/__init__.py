"""The terms of classical force fields. Each is a small function of torch operators, which defines it, and most have a
kernel in C++ that simulations use."""

from tutti.science.mol.terms.bonded import (
    HarmonicAngles,
    HarmonicBonds,
    HarmonicImpropers,
    PeriodicTorsions,
    RyckaertBellemansTorsions,
    UreyBradley,
)
from tutti.science.mol.terms.coulomb import Coulomb
from tutti.science.mol.terms.ewald import Ewald
from tutti.science.mol.terms.exclusions import neighbors_by_bonds
from tutti.science.mol.terms.lennard_jones import LennardJones
from tutti.science.mol.terms.pme import PME
from tutti.science.mol.terms.special_pairs import SpecialPairs

__all__ = [
    "PME",
    "Coulomb",
    "Ewald",
    "HarmonicAngles",
    "HarmonicBonds",
    "HarmonicImpropers",
    "LennardJones",
    "PeriodicTorsions",
    "RyckaertBellemansTorsions",
    "SpecialPairs",
    "UreyBradley",
    "neighbors_by_bonds",
]
