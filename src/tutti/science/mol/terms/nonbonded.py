"""Lennard-Jones and Coulomb pairs by one pass of the C++ kernel (pairwise.cpp)."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tutti.science.mol import native
from tutti.science.mol.neighbors import NeighborList, Pairs, unique_pairs
from tutti.science.mol.potential import Potential

if TYPE_CHECKING:
    from tutti.science.mol.terms.coulomb import Coulomb
    from tutti.science.mol.terms.ewald import Electrostatics
    from tutti.science.mol.terms.lennard_jones import LennardJones

LJ_MODES = {"cut": 1, "shift": 1, "force_shift": 2, "switch": 3}
_TABLES = ("a", "b", "shift", "slope")
_SCALARS = ("lj_cutoff", "coulomb_cutoff", "start", "quadratic", "constant", "alpha", "factor")


class _Pairwise(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("types", "lj", "coulomb")],
        *[(name, ctypes.c_double) for name in _SCALARS],
        *[(name, ctypes.c_void_p) for name in (*_TABLES, "inert", "type", "charge")],
    ]


class PairKernel:
    """The kernel's arguments for a Lennard-Jones term, a Coulomb term, or both."""

    def __init__(self, lj: LennardJones | None, coulomb: Coulomb | Electrostatics | None) -> None:
        self.arguments, self.tensors = _Pairwise(types=1), []
        if lj is not None:
            self._lennard_jones(lj)
        if coulomb is not None:
            self.arguments.coulomb_cutoff, self.arguments.factor = coulomb.cutoff, coulomb.coulomb
            self.arguments.charge = self._hold(coulomb.charges.detach())
            for name in ("quadratic", "constant", "alpha"):
                setattr(self.arguments, name, getattr(coulomb, name, 0.0))
            self.arguments.coulomb = 2 if hasattr(coulomb, "alpha") else 1
        self.sizes = [("types", lj and lj.types), ("charges", coulomb and coulomb.charges)]
        self.address = ctypes.addressof(self.arguments)

    def _lennard_jones(self, lj: LennardJones) -> None:
        x, arguments = lj.sigma**6, self.arguments
        end = torch.full_like(lj.sigma, lj.cutoff)
        shift, slope = lj.end_energy(end), lj.end_slope(end)
        tables = (4 * lj.epsilon * x * x, 4 * lj.epsilon * x, shift, slope)
        for name, table in zip(_TABLES, tables, strict=True):
            setattr(arguments, name, self._hold(table))
        arguments.inert = self._hold((lj.epsilon == 0).all(-1).to(torch.int64))
        arguments.types, arguments.lj = len(lj.sigma), LJ_MODES[lj.truncation]
        arguments.lj_cutoff, arguments.start = lj.cutoff, lj.switch or 0.0
        if lj.types is not None:
            arguments.type = self._hold(lj.types)

    def _hold(self, tensor: Tensor) -> int:
        self.tensors.append(tensor.contiguous())
        return self.tensors[-1].data_ptr()

    def add(
        self, positions: Tensor, cell: Tensor | None, neighbors: NeighborList, forces: Tensor, virial: Tensor | None
    ) -> Tensor:
        """Add to forces and virial; return energies (2, R) of Lennard-Jones and Coulomb."""
        replicas, atoms, _ = positions.shape
        for what, values in self.sizes:
            if values is not None and len(values) != atoms:
                raise ValueError(f"there are {what} for {len(values)} atoms, but there are {atoms}")
        energies = torch.zeros(2, replicas, dtype=torch.float64)
        positions = positions.contiguous()
        native.library().pairwise_add(
            self.address, neighbors.handle, positions.data_ptr(), address(cell), forces.data_ptr(),
            energies.data_ptr(), address(virial), torch.get_num_threads(),
        )  # fmt: skip
        return energies


def address(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()


class Nonbonded(Potential):
    """A Lennard-Jones and a Coulomb term, whose pairs are computed together. `Sum` makes it of the two."""

    name = "nonbonded"
    half = None

    def __init__(self, lj: LennardJones, coulomb: Coulomb | Electrostatics) -> None:
        if not torch.equal(unique_pairs(lj.exclusions), unique_pairs(coulomb.exclusions)):
            raise ValueError("Lennard-Jones and Coulomb terms exclude different pairs; give them the same exclusions")
        self.lj, self.coulomb = lj, coulomb
        self.cutoff, self.exclusions = max(lj.cutoff, coulomb.cutoff), lj.exclusions
        self.kernel = PairKernel(lj, coulomb)

    def energy(self, positions: Tensor, cell: Tensor | None, pairs: Pairs) -> Tensor:
        return self.lj.energy(positions, cell, pairs) + self.coulomb.energy(positions, cell, pairs)

    def accumulate(
        self, positions: Tensor, cell: Tensor | None, neighbors: NeighborList, forces: Tensor, virial: Tensor | None
    ) -> dict[str, Any]:
        of_lj, of_coulomb = self.kernel.add(positions, cell, neighbors, forces, virial)
        terms = {self.lj.name: of_lj} | self.lj.add_tail(positions, cell, virial)
        return terms | self.coulomb.add_rest(of_coulomb, positions, cell, neighbors, forces, virial)
