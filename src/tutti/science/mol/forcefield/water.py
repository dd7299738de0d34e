"""Boxes of water: SPC/E (Berendsen et al. 1987) and TIP3P (Jorgensen et al. 1983), rigid or flexible."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.science.mol.forcefield.field import ForceField, Nonbonding
from tutti.science.mol.potential import Potential
from tutti.science.mol.system import System
from tutti.science.mol.terms import HarmonicAngles, HarmonicBonds
from tutti.science.mol.units import CODATA_2018


@dataclass(frozen=True)
class Water:
    """Three sites. Lengths in nm, energies in kJ/mol, angles in degrees; stiffnesses are of flexible molecules."""

    sigma: float
    epsilon: float
    charge: float  # of hydrogen
    bond: float
    angle: float
    bond_stiffness: float
    angle_stiffness: float


WATER = {
    "spce": Water(0.31657195050398818, 0.6497752, 0.4238, 0.1, 109.47122063449069, 345000.0, 383.0),
    "tip3p": Water(0.31507524065751241, 0.635968, 0.417, 0.09572, 104.52, 462750.4, 836.8),
}
MOLAR_MASS = 15.999 + 2 * 1.008  # g/mol


def water_box(
    molecules: int,
    model: str = "spce",
    density: float = 0.997,
    nonbonding: Nonbonding | None = None,
    rigid: bool = True,
    seed: int = 0,
) -> tuple[System, ForceField]:
    """So many molecules at a density (g/cm^3) in a cubic cell, on a grid with random orientations.

    Minimise the energy before a simulation. rigid: bonds and angles are constraints of the force field, else harmonic.
    nonbonding: by default PME and tail corrections, with a cutoff of 0.9 nm or as much as fits.

    >>> system, field = water_box(64, "tip3p")
    >>> system.atoms, len(field.constraints)
    (192, 192)
    """
    if model not in WATER:
        raise ValueError(f"water model {model!r} is not known; there are {', '.join(WATER)}")
    if molecules < 1 or density <= 0:
        raise ValueError(f"{molecules} molecules at a density of {density} g/cm^3 cannot be: both must be positive")
    water = WATER[model]
    edge = (molecules * MOLAR_MASS / CODATA_2018.avogadro / density * 1e21) ** (1 / 3)
    cell = edge * torch.eye(3, dtype=torch.float64)[None]
    species = torch.tensor([8, 1, 1]).repeat(molecules)
    charges = torch.tensor([-2.0, 1, 1], dtype=torch.float64).repeat(molecules) * water.charge
    o = 3 * torch.arange(molecules)
    bonds = torch.stack([torch.stack([o, o + 1], 1), torch.stack([o, o + 2], 1)], 1).reshape(-1, 2)
    system = System(
        _positions(water, molecules, edge, seed),
        species,
        charges=charges,
        cell=cell,
        bonds=bonds,
        names=["O", "H1", "H2"] * molecules,
        residues=[f"HOH {k + 1}" for k in range(molecules) for _ in range(3)],
    )
    apart = torch.stack([o + 1, o + 2], 1)
    exclusions = torch.cat([bonds, apart])
    chosen = nonbonding or Nonbonding("pme", min(0.9, edge / 2))
    oxygen = species == 8
    sigma = torch.where(oxygen, water.sigma, 1.0).double()
    epsilon = torch.where(oxygen, water.epsilon, 0.0).double()
    terms: list[Potential] = chosen.terms(charges, sigma, epsilon, cell, exclusions)
    if not rigid:
        angles = torch.stack([o + 1, o, o + 2], 1)
        terms.append(HarmonicBonds(bonds, water.bond, water.bond_stiffness))
        terms.append(HarmonicAngles(angles, math.radians(water.angle), water.angle_stiffness))
        return system, ForceField(terms)
    between = 2 * water.bond * math.sin(math.radians(water.angle) / 2)
    lengths = [water.bond] * len(bonds) + [between] * molecules
    return system, ForceField(terms, exclusions, lengths)


def _positions(water: Water, molecules: int, edge: float, seed: int) -> Tensor:
    """(3 molecules, 3): a grid, each molecule turned by a random rotation."""
    generator = torch.Generator().manual_seed(seed)
    n = math.ceil(molecules ** (1 / 3) - 1e-9)
    grid = torch.cartesian_prod(*[torch.arange(n, dtype=torch.float64)] * 3) * (edge / n)
    chosen = grid[torch.linspace(0, n**3 - 1, molecules).round().long()]
    half = math.radians(water.angle) / 2
    x, z = water.bond * math.sin(half), water.bond * math.cos(half)
    shape = torch.tensor([[0.0, 0, 0], [x, 0, z], [-x, 0, z]], dtype=torch.float64)
    q = torch.randn(molecules, 4, dtype=torch.float64, generator=generator)
    return (chosen[:, None] + shape @ _rotations(q / q.norm(dim=-1, keepdim=True))).reshape(-1, 3)


def _rotations(q: Tensor) -> Tensor:
    """Matrices (M, 3, 3) of unit quaternions (M, 4)."""
    w, v = q[:, 0], q[:, 1:]
    zero = torch.zeros_like(w)
    x, y, z = v.T
    cross = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], 1).reshape(-1, 3, 3)
    return torch.eye(3, dtype=q.dtype) + 2 * w[:, None, None] * cross + 2 * cross @ cross
