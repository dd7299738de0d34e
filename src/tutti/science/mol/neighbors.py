"""Pairs of atoms within a cutoff, kept in Verlet lists that are built by cell lists in C++ (neighbors.cpp).

A list holds all pairs within cutoff + skin. It is built again when a pair might have come within the cutoff unseen:
when the two farthest displacements since the build, besides the deformation of the cell, add up to more than the skin.
Lists grow to the size that is needed. Nothing is folded: positions may lie anywhere, and pairs say which image of the
second atom they mean. Cells may have any shape, and be smaller than the cutoff: then pairs of an atom with several
images of another, or of itself, are listed.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutti.science.mol import cell as cells
from tutti.science.mol import native
from tutti.science.mol.part import Part
from tutti.science.mol.system import System, check_atoms


@dataclass(frozen=True)
class Pairs:
    """E pairs: the vector from i to j is positions[j] + shift @ cell - positions[i].

    In half lists each pair stands once, in full lists also as (j, i, -shift).
    """

    replica: Tensor  # (E) int64
    i: Tensor  # (E) int64
    j: Tensor  # (E) int64
    shift: Tensor  # (E, 3) int64
    pbc: cells.Periodic
    half: bool = True

    def __len__(self) -> int:
        return len(self.i)

    def vectors(self, positions: Tensor, cell: Tensor | None) -> Tensor:
        """(E, 3), differentiable with respect to positions (R, N, 3) and cell (R, 3, 3)."""
        d = positions[self.replica, self.j] - positions[self.replica, self.i]
        if cell is None or not any(self.pbc):
            return d
        return d + torch.einsum("ea,eab->eb", self.shift.to(cell.dtype), cell[self.replica])

    def where(self, mask: Tensor) -> Pairs:
        """Those of a mask (E)."""
        return Pairs(self.replica[mask], self.i[mask], self.j[mask], self.shift[mask], self.pbc, self.half)

    def within(self, cutoff: float, positions: Tensor, cell: Tensor | None) -> Pairs:
        """Those that are closer than the cutoff now."""
        return self.where(self.vectors(positions.detach(), cell).norm(dim=-1) < cutoff)

    def sum(self, values: Tensor, replicas: int) -> Tensor:
        """Add up values (E) by replica."""
        return torch.zeros(replicas, dtype=values.dtype).index_add(0, self.replica, values)


class NeighborList:
    """The pairs of a system within `cutoff`, valid until atoms have moved by half of `skin`.

    exclusions: (X, 2) atoms, of which the nearest image is left out of the list. part: the atoms that a process has, of
    a simulation that several share; each pair is in the list of one process.

    >>> neighbors = NeighborList(cutoff=1.0, skin=0.2)
    >>> x = torch.tensor([[[0.0, 0, 0], [2.5, 0, 0]]], dtype=torch.float64)
    >>> neighbors.update(x, 3 * torch.eye(3, dtype=torch.float64)[None])
    1
    >>> neighbors.pairs.vectors(x, 3 * torch.eye(3, dtype=torch.float64)[None]).abs()
    tensor([[0.5000, 0.0000, 0.0000]], dtype=torch.float64)
    """

    def __init__(
        self,
        cutoff: float,
        skin: float = 0.0,
        half: bool = True,
        pbc: bool | Sequence[bool] | None = None,
        exclusions: Any = None,
        part: Part | None = None,
    ) -> None:
        if not (cutoff >= 0 and skin >= 0 and cutoff + skin < float("inf")):
            raise ValueError(f"cutoff {cutoff} and skin {skin} must be finite and not negative")
        self.cutoff, self.skin, self.half = float(cutoff), float(skin), half
        self.exclusions = unique_pairs(exclusions)
        self.part = part
        self.builds = 0  # how often a replica's list was built
        self.suits: object = None  # the potential that was last found to want this list
        self._pbc = pbc
        self._key: tuple[Any, ...] | None = None
        self._handle: int | None = None
        self._pairs: Pairs | None = None

    @classmethod
    def of(
        cls, system: System, cutoff: float, skin: float = 0.0, half: bool = True, exclusions: Any = None,
        part: Part | None = None,
    ) -> NeighborList:  # fmt: skip
        """An up-to-date list of a system."""
        neighbors = cls(cutoff, skin, half, system.pbc, exclusions, part)
        neighbors.update(system.positions, system.cell)
        return neighbors

    def update(self, positions: Tensor, cell: Tensor | None = None, force: bool = False) -> int:
        """Build the lists of those replicas in which pairs may be missing, or of all. Returns how many were built.

        positions: (R, N, 3) float64, cell: (R, 3, 3) float64 or None.
        """
        key = (positions.shape, positions.dtype, cell is None)
        if key != self._key:
            self._start(positions, cell)
        positions, cell = positions.contiguous(), None if cell is None else cell.contiguous()
        h = None if cell is None else cell.data_ptr()
        built = native.library().neighbors_update(self._handle, positions.data_ptr(), h, force)
        if built < 0:
            if cell is not None:
                cells.check(cell, self.pbc)
            replica, rest = divmod(-1 - built, 3 * positions.shape[1])
            raise ValueError(
                f"the position of atom {rest // 3} of replica {replica} is not finite:"
                f" {positions[replica, rest // 3].tolist()}; take a shorter time step or minimise the energy first"
            )
        if built:
            self.builds += built
            self._pairs = None
        return built

    def _start(self, positions: Tensor, cell: Tensor | None) -> None:
        if positions.ndim != 3 or positions.shape[-1] != 3 or positions.dtype != torch.float64:
            raise ValueError(f"positions are (R, N, 3) float64, not {tuple(positions.shape)} {positions.dtype}")
        replicas, atoms, _ = positions.shape
        if cell is not None and (cell.shape != (replicas, 3, 3) or cell.dtype != torch.float64):
            raise ValueError(
                f"the cell is (R, 3, 3) float64, not {tuple(cell.shape)} {cell.dtype}, for {replicas} replicas"
            )
        self.pbc = cells.periodic(self._pbc, cell)
        if cell is not None:
            cells.check(cell, self.pbc)
        check_atoms("exclusion", self.exclusions, atoms)
        i, j = self.exclusions.T.contiguous()
        bits = sum(flag << k for k, flag in enumerate(self.pbc))
        library = native.library()
        self._handle = library.neighbors_new(
            self.cutoff, self.skin, bits, replicas, atoms, len(i), i.data_ptr(), j.data_ptr()
        )
        if self.part is not None:
            library.neighbors_divide(self._handle, self.part.owned, self.part.numbers.data_ptr())
        if self._key is not None:
            self._finalizer()
        self._finalizer = weakref.finalize(self, library.neighbors_delete, self._handle)
        self._key = (positions.shape, positions.dtype, cell is None)

    def motion(self, positions: Tensor, cell: Tensor | None) -> Tensor:
        """(3): how far the two atoms that moved farthest have gone since the build, besides the deformation of the
        cell, and what the sum of both must not exceed. Of one replica."""
        longest = torch.empty(3, dtype=torch.float64)
        h = None if cell is None else cell.data_ptr()
        native.library().neighbors_motion(self.handle, positions.data_ptr(), h, longest.data_ptr())
        return longest

    @property
    def handle(self) -> int:
        """The lists in their packed form, for kernels."""
        if self._handle is None:
            raise ValueError("the neighbor list is empty; call update(positions, cell) first")
        return self._handle

    @property
    def pairs(self) -> Pairs:
        """Pairs within cutoff + skin at the last build."""
        if self._pairs is None:
            handle, library = self.handle, native.library()
            n = library.neighbors_count(handle)
            replica, i, j = torch.empty(3, n, dtype=torch.int64)
            shift = torch.empty(n, 3, dtype=torch.int64)
            library.neighbors_copy(handle, replica.data_ptr(), i.data_ptr(), j.data_ptr(), shift.data_ptr())
            if not self.half:
                replica, i, j = replica.repeat(2), torch.cat([i, j]), torch.cat([j, i])
                shift = torch.cat([shift, -shift])
            self._pairs = Pairs(replica, i, j, shift, self.pbc, self.half)
        return self._pairs

    def __deepcopy__(self, memo: Any) -> NeighborList:
        return type(self)(self.cutoff, self.skin, self.half, self._pbc, self.exclusions.clone())

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a NeighborList is not saved; make it again from its cutoff and skin")


def unique_pairs(pairs: Any) -> Tensor:
    """(X, 2) int64, each pair once and ordered."""
    if pairs is None:
        return torch.zeros(0, 2, dtype=torch.int64)
    indices = torch.as_tensor(pairs, dtype=torch.int64).reshape(-1, 2)
    return torch.unique(indices.sort(-1).values, dim=0) if len(indices) else indices
