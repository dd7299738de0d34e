"""Distances that are held: rigid water, bonds of hydrogen.

Positions are corrected along the bonds before the step, so that momentum stays; velocities lose their part along the
bonds. Clusters of up to 12 constraints are solved for at once, which for water gives SETTLE's solution; larger ones by
SHAKE and RATTLE (dynamics.cpp has the sources).
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import breadth_first_order, connected_components
from torch import Tensor

from tutti.science.mol import cell as cells
from tutti.science.mol import native
from tutti.science.mol.system import check_atoms

TOLERANCE, MOST = 1e-12, 500  # relative error of squared lengths; iterations


class Constraints:
    """Distances between atoms, (C, 2) and (C), of a system with masses (N).

    Raises ValueError for a constraint between two atoms without mass. Molecules must be whole: the distance is that of
    the positions as they are, not of nearest images (`whole`, which a simulation calls before its first step).
    """

    def __init__(self, atoms: Any, lengths: Any, masses: Tensor, tolerance: float = TOLERANCE) -> None:
        pairs = torch.as_tensor(atoms, dtype=torch.int64).reshape(-1, 2)
        check_atoms("constraint", pairs, len(masses))
        inverse = torch.where(masses > 0, 1 / masses, 0.0)
        if bool((stuck := inverse[pairs].sum(1) == 0).any()):
            raise ValueError(
                f"the atoms {pairs[stuck][0].tolist()} have no mass; a distance between them cannot be held"
            )
        self.groups = groups(pairs, len(masses))
        order = torch.argsort(self.groups[pairs[:, 0]], stable=True)
        self.pairs, self.tolerance = pairs[order], tolerance
        self.lengths = torch.as_tensor(lengths, dtype=torch.float64)[order]
        _, sizes = torch.unique_consecutive(self.groups[self.pairs[:, 0]], return_counts=True)
        start = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        members = torch.unique(self.pairs)
        members = members[torch.argsort(self.groups[members], stable=True)]
        _, counts = torch.unique_consecutive(self.groups[members], return_counts=True)
        atom_start = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        first, second = self.pairs.T.contiguous()
        self._tensors = (start, first, second, atom_start, members, self.lengths, inverse)
        addresses = [ctypes.c_void_p(t.data_ptr()) for t in self._tensors]
        self._arguments = _Arguments(len(sizes), *addresses)
        self._members, self._atom_start = members, atom_start
        self.numbers: Tensor | None = None  # of the atoms, for messages

    def __len__(self) -> int:
        return len(self.pairs)

    def positions(self, old: Tensor, x: Tensor, v: Tensor | None = None, interval: float = 1.0) -> None:
        """Correct x (R, N, 3), which moved from `old` without constraints; v follows, as moved during `interval`."""
        self._call(0, old, x, None if v is None else v.data_ptr(), interval)

    def velocities(self, x: Tensor, v: Tensor) -> None:
        """Remove from v (R, N, 3) what would change lengths at x."""
        self._call(1, x, v, None, 1.0)

    def _call(self, kind: int, old: Tensor, x: Tensor, v: int | None, interval: float) -> None:
        replicas, atoms, _ = x.shape
        failed = native.library().constrain(
            ctypes.addressof(self._arguments), kind, replicas, atoms, old.data_ptr(), x.data_ptr(), v, interval,
            self.tolerance, MOST,
        )  # fmt: skip
        if failed >= 0:
            replica, cluster = divmod(failed, self._arguments.clusters)
            mine = self._members[self._atom_start[cluster] : self._atom_start[cluster + 1]]
            mine = (mine if self.numbers is None else self.numbers[mine]).tolist()
            self.fail(
                f"the distances between atoms {mine[:8]} of replica {replica} cannot be held: they moved too far in one"
                " step; take a shorter time step, or minimise the energy first"
            )

    def fail(self, message: str) -> None:
        raise ValueError(message)


def groups(pairs: Tensor, atoms: int) -> Tensor:
    """(N) int64: the number of the set that pairs (C, 2) connect an atom to."""
    i, j = pairs.numpy().T
    _, labels = connected_components(
        coo_matrix((torch.ones(len(pairs)).numpy(), (i, j)), (atoms, atoms)), directed=False
    )
    return torch.from_numpy(labels).to(torch.int64)


def whole(positions: Tensor, cell: Tensor, pbc: cells.Periodic, pairs: Tensor, lengths: Tensor) -> None:
    """Join what lies across faces of the cell: shift atoms of positions (R, N, 3) by lattice vectors, in place.

    Only if a pair (C, 2) is nearer to its length (C) by its nearest image than as it lies; then every pair along a
    spanning tree of each connected set becomes its nearest image, and the first atom of the set stays where it is.
    """
    i, j = pairs.T
    d = positions[:, j] - positions[:, i]
    error, error_of_image = ((x.norm(dim=-1) - lengths).abs() for x in (d, cells.minimum_image(d, cell, pbc)))
    if bool((error <= error_of_image + 1e-6 * lengths).all()):
        return
    atoms = positions.shape[1]
    group = groups(pairs, atoms)
    first = torch.full((atoms,), atoms).scatter_reduce(0, group, torch.arange(atoms), "amin")[: int(group.max()) + 1]
    root = torch.full_like(first, atoms)  # one tree for all sets
    edges = torch.cat([torch.stack([first, root], 1), pairs])
    graph = coo_matrix((torch.ones(len(edges)).numpy(), edges.T.numpy()), (atoms + 1, atoms + 1)).tocsr()
    parent = torch.from_numpy(breadth_first_order(graph, atoms, directed=False)[1][:atoms]).to(torch.int64)
    parent[first] = first
    d = positions - positions[:, parent]
    shift = cells.minimum_image(d, cell, pbc) - d
    while not torch.equal(above := parent[parent], parent):  # sums of shifts up to the first atom
        shift, parent = shift + shift[:, parent], above
    positions.add_(shift)


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("clusters", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("start", "first", "second", "atom_start", "atom", "length", "mass")),
    )
