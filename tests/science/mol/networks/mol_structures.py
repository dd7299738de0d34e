"""Structures with brute-force edges, for tests of networks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tutti.science.mol.networks import Network, PaiNN, Structure, pack


def structure(species: Tensor, positions: Tensor, cutoff: float, cell: Tensor | None = None, **targets: Any
              ) -> Structure:  # fmt: skip
    """All edges within the cutoff, of images up to two cells away."""
    shifts = torch.tensor(list(product((-2, -1, 0, 1, 2), repeat=3)) if cell is not None else [(0, 0, 0)])
    moved = shifts.to(positions.dtype) @ cell if cell is not None else shifts.to(positions.dtype)
    away = positions[None, None] + moved[:, None, None] - positions[None, :, None]  # (shift, i, j, 3)
    near = (away.norm(dim=-1) < cutoff) & (away.norm(dim=-1) > 1e-9)
    s, i, j = near.nonzero(as_tuple=True)
    order = torch.argsort(i, stable=True)
    return Structure(species, positions, i[order], j[order], shifts[s[order]] if cell is not None else None, cell,
                     **targets)  # fmt: skip


def molecule(atoms: int, seed: int, cutoff: float = 5.0, cell: Tensor | None = None, box: float | None = None,
             dtype: torch.dtype = torch.float64) -> Structure:  # fmt: skip
    """Random atoms of H, C, N and O that are not closer than 0.9."""
    draw = torch.Generator().manual_seed(seed)
    width = box or 2.0 * atoms ** (1 / 3)
    placed = torch.rand(1, 3, generator=draw, dtype=torch.float64) * width
    while len(placed) < atoms:
        new = torch.rand(1, 3, generator=draw, dtype=torch.float64) * width
        if float((placed - new).norm(dim=1).min()) > 0.9:
            placed = torch.cat([placed, new])
    species = torch.tensor([1, 6, 7, 8])[torch.randint(4, (atoms,), generator=draw)]
    return structure(species, placed.to(dtype), cutoff, None if cell is None else cell.to(dtype))


def rotation(seed: int) -> Tensor:
    """A proper rotation, float64."""
    q, _ = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    return q * torch.linalg.det(q).sign()


def labelled(network: Network, seeds: Iterable[int], cutoff: float = 4.0) -> list[Structure]:
    """Molecules of 4 to 8 atoms with energies and forces of `network`."""
    structures = []
    for seed in seeds:
        x = molecule(4 + seed % 5, seed, cutoff)
        energy, forces = network.energy_and_forces(pack([x]))
        structures.append(replace(x, energy=float(energy), forces=forces))
    return structures


def teacher() -> Network:
    """A network whose energies others can learn."""
    torch.manual_seed(0)
    network = PaiNN(16, 1, 10, 4.0).double()
    network.set_references({1: -13.0, 6: -1029.0, 7: -1485.0, 8: -2042.0}, 3.0)
    return network
