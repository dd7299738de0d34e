"""Structures with brute-force edges, for tests of networks."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor

from tutti.science.mol.networks import Structure


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
