"""Terms of bonds, angles and torsions. Differences are those of nearest images, so molecules may lie across faces.

Stiffnesses follow E = k x^2 / 2 (OpenMM, GROMACS); those of Amber and CHARMM files are without the half.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tutti.science.mol import cell as cells
from tutti.science.mol.neighbors import NeighborList, Pairs
from tutti.science.mol.part import Part
from tutti.science.mol.potential import Potential, copy_without_caches
from tutti.science.mol.system import check_atoms, check_finite
from tutti.science.mol.terms.tuples import TupleKernel, add, pointers


def distance(a: Tensor) -> Tensor:
    return a.norm(dim=-1)


def angle(a: Tensor, b: Tensor) -> Tensor:
    """Between two vectors, in [0, pi]; accurate near both ends."""
    return torch.atan2(torch.linalg.cross(a, b).norm(dim=-1), (a * b).sum(-1))


def dihedral(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The dihedral angle of consecutive bond vectors, in (-pi, pi], positive clockwise along b (IUPAC): pi is trans."""
    n, m = torch.linalg.cross(a, b), torch.linalg.cross(b, c)
    return torch.atan2(b.norm(dim=-1) * (a * m).sum(-1), (n * m).sum(-1))


def harmonic(x: Tensor, stiffness: Tensor) -> Tensor:
    return 0.5 * stiffness * x**2


class Bonded(Potential):
    """Tuples of atoms (B, size) with parameters (B) each. `form` gives their energies (R, B) from consecutive
    differences of positions."""

    size: int
    parameters: tuple[str, ...]
    kind: str  # for the kernel
    energies: tuple[str, ...]  # names of what the kernel gives

    def __init__(self, atoms: Any, **parameters: Any) -> None:
        self.atoms = torch.as_tensor(atoms, dtype=torch.int64).reshape(-1, self.size)
        if len(self.atoms):
            check_atoms(self.name, self.atoms, int(self.atoms.max()) + 1)
        for name in self.parameters:
            values = torch.as_tensor(parameters[name], dtype=torch.float64)
            if values.shape not in ((), (len(self.atoms),)):
                raise ValueError(
                    f"{self.name}: {name} has shape {tuple(values.shape)}, but there are {len(self.atoms)} of them"
                )
            values = values.expand(len(self.atoms)).contiguous()
            check_finite(f"{self.name}: {name}", values)
            setattr(self, name, values)
        self.energies = (self.name,)

    def __len__(self) -> int:
        return len(self.atoms)

    @cached_property
    def kernel(self) -> TupleKernel:
        return TupleKernel(self.kind, self.atoms, self.kernel_parameters())

    def kernel_parameters(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.parameters]

    def join(self, other: Potential) -> Potential | None:
        return BondedTerms([self, other]) if isinstance(other, Bonded) else None

    def accumulate(
        self, positions: Tensor, cell: Tensor | None, neighbors: NeighborList, forces: Tensor, virial: Tensor | None
    ) -> dict[str, Tensor]:
        return BondedTerms([self]).accumulate(positions, cell, neighbors, forces, virial)

    def divide(self, part: Part) -> Bonded:
        """The tuples whose first atom the process owns."""
        divided, rows = copy_without_caches(self), part.rows(self.atoms)
        divided.atoms = part.tuples(self.atoms[rows], self.name)
        for name in self.parameters:
            setattr(divided, name, getattr(self, name)[rows])
        return divided

    def form(self, d: list[Tensor]) -> Tensor:
        raise NotImplementedError

    def differences(self, positions: Tensor, cell: Tensor | None, pbc: cells.Periodic) -> list[Tensor]:
        columns = self.atoms.T
        return [
            cells.minimum_image(positions[:, columns[k + 1]] - positions[:, columns[k]], cell, pbc)
            for k in range(self.size - 1)
        ]

    def energy(self, positions: Tensor, cell: Tensor | None, pairs: Pairs) -> Tensor:
        if len(self.atoms) and int(self.atoms.max()) >= positions.shape[1]:
            check_atoms(self.name, self.atoms, positions.shape[1])
        return self.form(self.differences(positions, cell, pairs.pbc)).sum(-1)


class HarmonicBonds(Bonded):
    """k (r - r0)^2 / 2 of atoms (B, 2)."""

    name, size, parameters = "bonds", 2, ("length", "stiffness")
    kind = "bonds"
    length: Tensor
    stiffness: Tensor

    def __init__(self, atoms: Any, length: Any, stiffness: Any) -> None:
        super().__init__(atoms, length=length, stiffness=stiffness)
        _check_stiffness(self.name, self.stiffness)

    def form(self, d: list[Tensor]) -> Tensor:
        return harmonic(distance(d[0]) - self.length, self.stiffness)


class UreyBradley(HarmonicBonds):
    """Harmonic in the distance of the outer atoms of an angle, (B, 2)."""

    name = "urey_bradley"


class HarmonicAngles(Bonded):
    """k (theta - theta0)^2 / 2 of atoms (B, 3), the vertex in the middle; radians."""

    name, size, parameters = "angles", 3, ("angle", "stiffness")
    kind = "angles"
    angle: Tensor
    stiffness: Tensor

    def __init__(self, atoms: Any, angle: Any, stiffness: Any) -> None:
        super().__init__(atoms, angle=angle, stiffness=stiffness)
        _check_stiffness(self.name, self.stiffness)

    def form(self, d: list[Tensor]) -> Tensor:
        return harmonic(angle(-d[0], d[1]) - self.angle, self.stiffness)


class PeriodicTorsions(Bonded):
    """k (1 + cos(n phi - phase)) of atoms (B, 4). Amber's impropers have this form too."""

    name, size, parameters = "torsions", 4, ("periodicity", "phase", "stiffness")
    kind = "torsions"
    periodicity: Tensor
    phase: Tensor
    stiffness: Tensor

    def __init__(self, atoms: Any, periodicity: Any, phase: Any, stiffness: Any) -> None:
        super().__init__(atoms, periodicity=periodicity, phase=phase, stiffness=stiffness)
        if not bool((self.periodicity == self.periodicity.round()).all()):
            raise ValueError("torsions: the periodicity is a whole number")

    def form(self, d: list[Tensor]) -> Tensor:
        return self.stiffness * (1 + torch.cos(self.periodicity * dihedral(*d) - self.phase))


class HarmonicImpropers(Bonded):
    """k (xi - xi0)^2 / 2 of the dihedral xi of atoms (B, 4), by the shorter way round (CHARMM, GROMACS)."""

    name, size, parameters = "impropers", 4, ("angle", "stiffness")
    kind = "impropers"
    angle: Tensor
    stiffness: Tensor

    def __init__(self, atoms: Any, angle: Any, stiffness: Any) -> None:
        super().__init__(atoms, angle=angle, stiffness=stiffness)

    def form(self, d: list[Tensor]) -> Tensor:
        x = dihedral(*d) - self.angle
        return harmonic(x - 2 * torch.pi * torch.round(x.detach() / (2 * torch.pi)), self.stiffness)


class RyckaertBellemansTorsions(Bonded):
    """sum of c_n cos(phi - pi)^n, n = 0..5, of atoms (B, 4)."""

    name, size, parameters = "ryckaert_bellemans", 4, ("c0", "c1", "c2", "c3", "c4", "c5")
    kind = "ryckaert_bellemans"

    def __init__(self, atoms: Any, coefficients: Any) -> None:
        c = torch.as_tensor(coefficients, dtype=torch.float64)
        if c.shape[-1] != 6:
            raise ValueError(f"ryckaert_bellemans: coefficients are six numbers, not {c.shape[-1]}")
        super().__init__(atoms, **{f"c{n}": c[..., n] for n in range(6)})

    def form(self, d: list[Tensor]) -> Tensor:
        x = -torch.cos(dihedral(*d))
        total = torch.zeros_like(x)
        for n in range(5, -1, -1):
            total = total * x + getattr(self, f"c{n}")
        return total


def _check_stiffness(name: str, stiffness: Tensor) -> None:
    """Bonds and angles fly apart without a minimum; the stiffness of a torsion may have any sign."""
    if bool((negative := stiffness < 0).any()):
        entry = int(negative.nonzero()[0])
        raise ValueError(f"{name}: stiffness must not be negative, but entry {entry} is {float(stiffness[entry])}")


class BondedTerms(Potential):
    """Bonded terms that the kernel computes in one call."""

    name = "bonded"

    def __init__(self, terms: Sequence[Bonded]) -> None:
        self.terms = list(terms)
        self.kernels = [term.kernel for term in self.terms]
        self.pointers = pointers(self.kernels)

    def energy(self, positions: Tensor, cell: Tensor | None, pairs: Pairs) -> Tensor:
        zero = positions.new_zeros(len(positions))
        return sum((term.energy(positions, cell, pairs) for term in self.terms), start=zero)

    def join(self, other: Potential) -> Potential | None:
        return BondedTerms([*self.terms, other]) if isinstance(other, Bonded) else None

    def accumulate(
        self, positions: Tensor, cell: Tensor | None, neighbors: NeighborList, forces: Tensor, virial: Tensor | None
    ) -> dict[str, Tensor]:
        energies = add(self.kernels, self.pointers, positions, cell, neighbors, forces, virial)
        result: dict[str, Tensor] = {}
        for k, term in enumerate(self.terms):
            for name, energy in zip(term.energies, energies[:, k].unbind(-1), strict=False):
                result[name] = result[name] + energy if name in result else energy
        return result
