"""Structures of different sizes, packed without padding.

    batch = pack([Structure(species, positions, i, j, shifts, cell), ...])

An edge (i, j, shift) says that atom j, moved by shift @ cell, is a neighbour of atom i: both directions are edges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.science.mol.networks.ragged import sum_at


@dataclass(frozen=True)
class Structure:
    """Atoms, edges within a cutoff, and targets.

    species (A) int64: atomic numbers. positions (A, 3). i, j (E) int64: atoms of each edge. shifts (E, 3) in cell
    vectors, or None. cell (3, 3): rows are lattice vectors, or None. energy: 0-d or a number. forces (A, 3).
    """

    species: Tensor
    positions: Tensor
    i: Tensor
    j: Tensor
    shifts: Tensor | None = None
    cell: Tensor | None = None
    energy: Tensor | float | None = None
    forces: Tensor | None = None

    def __post_init__(self) -> None:
        atoms, edges = len(self.species), len(self.i)
        _shape("positions", self.positions, (atoms, 3))
        _shape("j", self.j, (edges,))
        if self.shifts is not None:
            _shape("shifts", self.shifts, (edges, 3))
            if self.cell is None and bool((self.shifts != 0).any()):
                raise ValueError("the structure has shifts other than 0 but no cell: give the cell that they count in")
        if self.cell is not None:
            _shape("cell", self.cell, (3, 3))
        if self.forces is not None:
            _shape("forces", self.forces, (atoms, 3))
        if edges and not 0 <= int(min(self.i.min(), self.j.min())) <= int(max(self.i.max(), self.j.max())) < atoms:
            raise ValueError(f"edges name atoms {int(min(self.i.min(), self.j.min()))} to "
                             f"{int(max(self.i.max(), self.j.max()))} of {atoms}")  # fmt: skip
        if atoms and not 1 <= int(self.species.min()) <= int(self.species.max()) < SPECIES:
            raise ValueError(f"species are atomic numbers from 1 to {SPECIES - 1}, not {int(self.species.min())} to "
                             f"{int(self.species.max())}")  # fmt: skip

    def offsets(self) -> Tensor:
        """What is added to the position of j, for each edge (E, 3)."""
        if self.cell is None or self.shifts is None:
            return self.positions.new_zeros(len(self.i), 3)
        return self.shifts.to(self.positions.dtype) @ self.cell.to(self.positions.dtype)


SPECIES = 119  # rows of tables by atomic number; row 0 is padding


@dataclass(frozen=True)
class Batch:
    """B structures: as `Structure`, with atoms and edges after one another.

    molecule (A) int64: the structure of each atom. cell (B, 3, 3) or None. energy (B), forces (A, 3), or None. counted:
    the first so many atoms have energies, which all others are only the surroundings of; None for all.
    """

    species: Tensor
    positions: Tensor
    molecule: Tensor
    i: Tensor
    j: Tensor
    count: int
    shifts: Tensor | None = None
    cell: Tensor | None = None
    energy: Tensor | None = None
    forces: Tensor | None = None
    counted: int | None = None

    def sum(self, of_atoms: Tensor) -> Tensor:
        """Sums (B) of values (A), of the atoms that have energies."""
        return sum_at(of_atoms[: self.counted], self.molecule[: self.counted], self.count)

    @property
    def sizes(self) -> Tensor:
        """Atoms of each structure (B)."""
        return torch.bincount(self.molecule, minlength=self.count)

    def offsets(self) -> Tensor:
        """What is added to the position of j, for each edge (E, 3). Differentiable by the cell."""
        if self.cell is None or self.shifts is None:
            return self.positions.new_zeros(len(self.i), 3)
        cell = self.cell.index_select(0, self.molecule.index_select(0, self.i))
        return torch.einsum("ec,ecd->ed", self.shifts.to(cell.dtype), cell).to(self.positions.dtype)


def pack(structures: Sequence[Structure]) -> Batch:
    """One batch. A structure without a cell beside others with one has a cell of zeros."""
    if not structures:
        raise ValueError("pack: at least one structure")
    sizes = torch.tensor([len(x.species) for x in structures])
    starts = (sizes.cumsum(0) - sizes).tolist()
    cells = any(x.cell is not None for x in structures)
    like = structures[0].positions
    energies = [x.energy for x in structures]
    forces = [x.forces for x in structures]
    return Batch(
        species=torch.cat([x.species for x in structures]),
        positions=torch.cat([x.positions for x in structures]),
        molecule=torch.repeat_interleave(torch.arange(len(structures)), sizes).to(like.device),
        i=torch.cat([x.i + n for x, n in zip(structures, starts, strict=True)]),
        j=torch.cat([x.j + n for x, n in zip(structures, starts, strict=True)]),
        count=len(structures),
        shifts=torch.cat([like.new_zeros(len(x.i), 3) if x.shifts is None else x.shifts.to(like.dtype)
                          for x in structures]) if cells else None,
        cell=torch.stack([like.new_zeros(3, 3) if x.cell is None else x.cell.to(like.dtype)
                          for x in structures]) if cells else None,
        energy=None if any(x is None for x in energies) else torch.tensor([float(x) for x in energies if x is not None],
                                                                         dtype=torch.float64, device=like.device),
        forces=None if any(x is None for x in forces) else torch.cat([x for x in forces if x is not None]),
    )  # fmt: skip


def groups(
    structures: Sequence[Structure], order: Sequence[int], atoms: int, edges: int, most: int | None = None
) -> Iterator[list[int]]:
    """Consecutive indices of `order` whose structures have together at most so many atoms and edges.

    most: structures in a group.

    Raises ValueError for a structure that is larger than the limits.
    """
    group: list[int] = []
    room = [atoms, edges]
    for index in order:
        size = len(structures[index].species), len(structures[index].i)
        if size[0] > atoms or size[1] > edges:
            raise ValueError(f"structure {index} has {size[0]} atoms and {size[1]} edges, more than the limits of a "
                             f"batch, {atoms} and {edges}: raise them")  # fmt: skip
        if size[0] > room[0] or size[1] > room[1] or len(group) == most:
            yield group
            group, room = [], [atoms, edges]
        group.append(index)
        room = [room[0] - size[0], room[1] - size[1]]
    if group:
        yield group


def _shape(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} of a structure: {shape}, not {tuple(x.shape)}")
