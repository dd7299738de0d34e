"""Atoms: what they are, where they are, and the cell that repeats them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tutti.extras import extra
from tutti.science.mol import cell as cells
from tutti.science.mol.elements import MASSES, NUMBERS, SYMBOLS
from tutti.science.mol.units import ELECTRONVOLT, MD, Units, factor


@dataclass
class System:
    """R replicas of N atoms. Arguments may leave out R; fields always have it.

    | field | |
    |---|---|
    | positions, velocities | (R, N, 3) float64; positions are never folded into the cell |
    | species | (N) int64 atomic numbers, 0 for particles that are no element |
    | masses, charges | (N) float64; masses default to those of the elements |
    | cell | (R, 3, 3), rows are lattice vectors, or None; an edge or three edges will do |
    | pbc | which lattice vectors repeat; those that do not are ignored |
    | names, residues | labels of atoms for files |
    | bonds | (B, 2) int64 |

    >>> argon = System([[0.0, 0, 0], [0.4, 0, 0]], species=["Ar", "Ar"], cell=3.0)
    >>> argon.positions.shape, argon.pbc
    (torch.Size([1, 2, 3]), (True, True, True))
    """

    positions: Any
    species: Any = None
    masses: Any = None
    charges: Any = None
    cell: Any = None
    pbc: Any = None
    velocities: Any = None
    names: Sequence[str] | None = None
    residues: Sequence[str] | None = None
    bonds: Any = None
    units: Units = MD

    def __post_init__(self) -> None:
        x = torch.as_tensor(self.positions, dtype=torch.float64)
        x = x[None] if x.ndim == 2 else x
        if x.ndim != 3 or x.shape[-1] != 3 or not x.shape[1]:
            raise ValueError(f"positions have shape {tuple(x.shape)}; they are (atoms, 3) or (replicas, atoms, 3)")
        self.positions = x.contiguous()
        if not bool(x.detach().isfinite().all()):
            r, n = (~x.detach().isfinite()).any(-1).nonzero()[0].tolist()
            raise ValueError(f"the position of atom {n} of replica {r} is not finite: {x[r, n].tolist()}")
        atoms = x.shape[1]
        self.species = _species(self.species, atoms)
        if self.masses is None:
            self.masses = _masses(self.species, self.units)
        self.masses = _per_atom("masses", self.masses, atoms)
        if not bool((self.masses >= 0).all()):
            raise ValueError(f"the mass of atom {int((self.masses < 0).nonzero()[0])} is negative")
        self.charges = _per_atom("charges", 0.0 if self.charges is None else self.charges, atoms)
        self.cell = cells.as_cell(self.cell, len(x))
        self.pbc = cells.periodic(self.pbc, self.cell)
        if self.cell is not None:
            cells.check(self.cell, self.pbc)
        v = torch.zeros_like(self.positions) if self.velocities is None else self.velocities
        v = torch.as_tensor(v, dtype=torch.float64)
        if v.shape not in (x.shape, x.shape[1:]):
            raise ValueError(f"velocities have shape {tuple(v.shape)}, but positions {tuple(x.shape)}")
        self.velocities = v.expand(x.shape).contiguous()
        for name in ("names", "residues"):
            labels = getattr(self, name)
            if labels is not None and len(labels) != atoms:
                raise ValueError(f"there are {len(labels)} {name} for {atoms} atoms")
        if self.bonds is not None:
            self.bonds = torch.as_tensor(self.bonds, dtype=torch.int64).reshape(-1, 2)
            check_atoms("bonds", self.bonds, atoms)

    @property
    def replicas(self) -> int:
        return self.positions.shape[0]

    @property
    def atoms(self) -> int:
        return self.positions.shape[1]

    def replicate(self, replicas: int) -> System:
        """Copies of a single replica, which then move apart."""
        if self.replicas != 1:
            raise ValueError(f"the system has {self.replicas} replicas already")
        copies = {name: getattr(self, name).repeat(replicas, 1, 1) for name in ("positions", "velocities")}
        return replace(self, cell=None if self.cell is None else self.cell.repeat(replicas, 1, 1), **copies)

    def wrapped(self) -> Tensor:
        """Positions folded into the cell, atom by atom, for pictures."""
        return self.positions if self.cell is None else cells.wrap(self.positions, self.cell, self.pbc)

    @classmethod
    def from_ase(cls, atoms: Any, units: Units = MD) -> System:
        """From `ase.Atoms`: its velocities, masses and initial charges too."""
        import numpy as np

        length, velocity, mass = (factor(x, ELECTRONVOLT, units) for x in ("length", "velocity", "mass"))
        pbc = tuple(bool(x) for x in atoms.pbc)
        matrix = np.array(atoms.cell[:])
        return cls(
            positions=torch.from_numpy(atoms.get_positions()) * length,
            species=torch.from_numpy(atoms.numbers.astype(np.int64)),
            masses=torch.from_numpy(atoms.get_masses()) * mass,
            charges=torch.from_numpy(atoms.get_initial_charges()),
            cell=torch.from_numpy(matrix) * length if any(pbc) or matrix.any() else None,
            pbc=pbc,
            velocities=torch.from_numpy(atoms.get_velocities()) * velocity,
            units=units,
        )

    def to_ase(self, replica: int = 0) -> Any:
        """`ase.Atoms` of one replica, in angstrom, positions as they are."""
        with extra("mol"):
            from ase import Atoms
        length, velocity, mass = (factor(x, self.units, ELECTRONVOLT) for x in ("length", "velocity", "mass"))
        return Atoms(
            numbers=self.species.numpy(),
            positions=self.positions[replica].detach().numpy() * length,
            masses=self.masses.numpy() * mass,
            charges=self.charges.detach().numpy(),
            cell=None if self.cell is None else self.cell[replica].numpy() * length,
            pbc=self.pbc,
            velocities=self.velocities[replica].detach().numpy() * velocity,
        )


def check_atoms(what: str, indices: Tensor, atoms: int) -> None:
    """Raise ValueError where a tuple of atoms names one that does not exist, or one twice."""
    wrong = ((indices < 0) | (indices >= atoms)).any(-1)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(f"{what} {row} joins atoms {indices[row].tolist()}, but there are {atoms} atoms (from 0)")
    ordered = indices.sort(-1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(-1)
    if bool(twice.any()):
        row = int(twice.nonzero()[0])
        raise ValueError(f"{what} {row} names an atom twice: {indices[row].tolist()}")


def check_finite(what: str, values: Tensor) -> None:
    """Raise ValueError where one of values (n) is not a finite number."""
    if not bool((finite := values.detach().isfinite()).all()):
        entry = int((~finite).nonzero()[0])
        raise ValueError(f"{what} must be finite, but entry {entry} is {float(values[entry])}")


def check_replicas(what: str, values: Tensor, replicas: int) -> None:
    """Raise ValueError unless there is one value for all replicas or one for each."""
    if values.numel() not in (1, replicas):
        raise ValueError(f"there are {values.numel()} {what} for {replicas} replica{'s' * (replicas > 1)}")


def _species(species: Any, atoms: int) -> Tensor:
    if species is None:
        return torch.zeros(atoms, dtype=torch.int64)
    if not isinstance(species, Tensor):
        values = [species] * atoms if isinstance(species, str | int) else list(species)
        unknown = [x for x in values if isinstance(x, str) and x not in NUMBERS]
        if unknown:
            raise ValueError(
                f"there is no element {unknown[0]!r}; symbols are written as in {SYMBOLS[6]}, {SYMBOLS[17]}"
            )
        species = torch.tensor([NUMBERS[x] if isinstance(x, str) else int(x) for x in values])
    if species.shape != (atoms,):
        raise ValueError(f"species have shape {tuple(species.shape)}, but there are {atoms} atoms")
    if bool(((species < 0) | (species >= len(SYMBOLS))).any()):
        raise ValueError(f"species are atomic numbers from 0 to {len(SYMBOLS) - 1}, found {species.tolist()[:5]} ...")
    return species.to(torch.int64)


def _masses(species: Tensor, units: Units) -> Tensor:
    if units.mass_amu is None:
        return torch.ones(len(species), dtype=torch.float64)
    return torch.tensor(MASSES, dtype=torch.float64)[species] / units.mass_amu


def _per_atom(name: str, numbers: Any, atoms: int) -> Tensor:
    values = torch.as_tensor(numbers, dtype=torch.float64)
    if values.shape not in ((), (atoms,)):
        raise ValueError(f"{name} have shape {tuple(values.shape)}, but there are {atoms} atoms")
    values = values.expand(atoms).contiguous()
    check_finite(name, values)
    return values
