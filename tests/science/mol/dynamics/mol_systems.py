"""Small systems for tests of dynamics."""

from __future__ import annotations

import torch

from tutti.science.mol.system import System
from tutti.science.mol.terms import HarmonicBonds, LennardJones
from tutti.science.mol.units import REDUCED


def fluid(cells: int = 3, density: float = 0.8442) -> System:
    """Lennard-Jones atoms on a face-centred cubic lattice, 4 cells^3, of mass 1 in reduced units."""
    edge = (4 / density) ** (1 / 3)
    corners = torch.tensor([[0, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]], dtype=torch.float64)
    grid = torch.cartesian_prod(*[torch.arange(cells, dtype=torch.float64)] * 3)
    return System((grid[:, None] + corners).reshape(-1, 3) * edge, masses=1.0, cell=cells * edge, units=REDUCED)


def lennard_jones(cutoff: float = 2.0) -> LennardJones:
    return LennardJones(1.0, 1.0, cutoff, truncation="force_shift", tail=False)


def oscillator(mass: float = 1.0, stiffness: float = 1.0) -> tuple[System, HarmonicBonds]:
    """Two atoms and a spring of length 1."""
    return System([[0.0, 0, 0], [1.2, 0, 0]], masses=mass, units=REDUCED), HarmonicBonds([[0, 1]], 1.0, stiffness)
