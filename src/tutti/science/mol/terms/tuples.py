"""Listed tuples of atoms by the C++ kernel (tuples.cpp): any number of lists in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from tutti.science.mol import native
from tutti.science.mol.neighbors import NeighborList
from tutti.science.mol.system import check_atoms
from tutti.science.mol.terms.nonbonded import address

KINDS = ("bonds", "angles", "torsions", "impropers", "ryckaert_bellemans", "special_pairs", "erf")


class _Tuples(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("atoms", ctypes.c_void_p),
        ("p", ctypes.c_void_p * 6),
    ]


class TupleKernel:
    """The kernel's arguments for tuples (B, size) of one kind with parameters (B) each."""

    def __init__(self, kind: str, atoms: Tensor, parameters: Sequence[Tensor]) -> None:
        self.tensors = [atoms.contiguous(), *[x.detach().contiguous() for x in parameters]]
        pointers = [x.data_ptr() for x in self.tensors]
        self.arguments = _Tuples(KINDS.index(kind), len(atoms), pointers[0], (ctypes.c_void_p * 6)(*pointers[1:]))
        self.kind, self.atoms = kind, atoms
        self.last = int(atoms.max()) if len(atoms) else -1

    def add(
        self, positions: Tensor, cell: Tensor | None, neighbors: NeighborList, forces: Tensor, virial: Tensor | None
    ) -> Tensor:
        """Add to forces and virial; return energies (R)."""
        return add([self], pointers([self]), positions, cell, neighbors, forces, virial)[:, 0].sum(-1)


def pointers(kernels: Sequence[TupleKernel]) -> ctypes.Array:
    return (ctypes.c_void_p * len(kernels))(*[ctypes.addressof(kernel.arguments) for kernel in kernels])


def add(
    kernels: Sequence[TupleKernel], pointers: ctypes.Array, positions: Tensor, cell: Tensor | None,
    neighbors: NeighborList, forces: Tensor, virial: Tensor | None,
) -> Tensor:  # fmt: skip
    """Add to forces and virial; return energies (R, kernels, 2), the second being Coulomb energies of special pairs."""
    replicas, atoms, _ = positions.shape
    for kernel in kernels:
        if kernel.last >= atoms:
            check_atoms(kernel.kind, kernel.atoms, atoms)
    energies = torch.zeros(replicas, len(kernels), 2, dtype=torch.float64)
    positions = positions.contiguous()
    bits = sum(flag << k for k, flag in enumerate(neighbors.pbc))
    native.library().tuples_add(
        len(kernels), pointers, replicas, atoms, bits, positions.data_ptr(), address(cell), forces.data_ptr(),
        energies.data_ptr(), address(virial),
    )  # fmt: skip
    return energies
