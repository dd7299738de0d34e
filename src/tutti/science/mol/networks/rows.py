"""Rows of equal size for captured training steps: each row holds several whole structures and some padding.

Rows split over devices like any batch, and one shape is captured once. Padding has species 0, molecule 0 and weight 0;
padded edges lead from atom 0 to itself and are twice as long as the cutoff, where filters are 0.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.science.mol.networks.batch import Structure, groups
from tutti.science.mol.networks.network import Network


@dataclass(frozen=True)
class Limits:
    """The sizes of a row: atoms, edges and structures."""

    atoms: int
    edges: int
    structures: int

    @classmethod
    def of(cls, structures: Sequence[Structure], each: int) -> Limits:
        """Room for about `each` structures of mean size, and for the largest."""
        atoms, edges = [len(x.species) for x in structures], [len(x.i) for x in structures]
        if len(set(atoms)) == 1:  # configurations of one molecule: the number of edges varies little
            return cls(each * atoms[0], max(round(each * _mean(edges) * 1.05), *edges, 1), each)
        return cls(max(round(each * _mean(atoms)), *atoms), max(round(each * _mean(edges) * 1.1), *edges, 1), 2 * each)


class Rows:
    """A dataset of `number` rows: passes over the structures, each shuffled anew and packed within the limits.

    Row k is a function of k and the seed alone, so training resumes anywhere.
    """

    def __init__(self, structures: Sequence[Structure], network: Network, limits: Limits, number: int, seed: int = 0
                 ) -> None:  # fmt: skip
        self.structures, self.limits, self.number, self.seed = structures, limits, number, seed
        self.cutoff, self.references = network.cutoff, network.references.cpu()
        self.passes: list[list[list[int]]] = []
        self.ends: list[int] = []  # number of rows up to the end of each pass

    def __len__(self) -> int:
        return self.number

    def indices(self, k: int) -> list[int]:
        """The structures of row k."""
        while not self.ends or self.ends[-1] <= k:
            draw = torch.Generator().manual_seed(self.seed + len(self.passes))
            order = torch.randperm(len(self.structures), generator=draw).tolist()
            self.passes.append(list(groups(self.structures, order, self.limits.atoms, self.limits.edges,
                                           self.limits.structures)))  # fmt: skip
            self.ends.append((self.ends[-1] if self.ends else 0) + len(self.passes[-1]))
        at = bisect_right(self.ends, k)
        return self.passes[at][k - (self.ends[at - 1] if at else 0)]

    def __getitem__(self, k: int) -> dict[str, Tensor]:
        if not 0 <= k < self.number:
            raise IndexError(k)
        return row([self.structures[n] for n in self.indices(k)], self.limits, self.cutoff, self.references)


def row(structures: Sequence[Structure], limits: Limits, cutoff: float, references: Tensor) -> dict[str, Tensor]:
    """float32 targets without references, and vectors from i to j that were taken in the positions' dtype.

    species, molecule (atoms); vectors (edges, 3), i, j (edges); energy (structures), atoms (structures), 0 for none;
    forces (atoms, 3).
    """
    a, e, s = limits.atoms, limits.edges, limits.structures
    arrays = {
        "species": torch.zeros(a, dtype=torch.int64), "molecule": torch.zeros(a, dtype=torch.int64),
        "i": torch.zeros(e, dtype=torch.int64), "j": torch.zeros(e, dtype=torch.int64),
        "vectors": torch.tensor([2 * cutoff, 0.0, 0.0]).repeat(e, 1), "energy": torch.zeros(s),
        "atoms": torch.zeros(s), "forces": torch.zeros(a, 3),
    }  # fmt: skip
    atom = edge = 0
    for n, x in enumerate(structures):
        atoms, edges = slice(atom, atom + len(x.species)), slice(edge, edge + len(x.i))
        arrays["species"][atoms], arrays["molecule"][atoms] = x.species, n
        arrays["i"][edges], arrays["j"][edges] = x.i + atom, x.j + atom
        arrays["vectors"][edges] = (x.positions[x.j] - x.positions[x.i] + x.offsets()).float()
        arrays["atoms"][n] = len(x.species)
        if x.energy is not None:
            arrays["energy"][n] = float(x.energy) - float(references[x.species].sum())
        if x.forces is not None:
            arrays["forces"][atoms] = x.forces.float()
        atom, edge = atoms.stop, edges.stop
    return arrays


def _mean(numbers: Sequence[int]) -> float:
    return sum(numbers) / len(numbers)
