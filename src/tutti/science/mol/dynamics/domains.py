"""How space is divided among processes: a grid of boxes in fractional coordinates, each with as many atoms.

Axis 0 is cut at quantiles of the atoms, each slab along axis 1, each column along axis 2. So every process begins with
the same number of atoms, also where they are not spread evenly. Cuts stay until a restart file is written or read, or
until a box is empty.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.science.mol import cell as cells
from tutti.science.mol.system import System


@dataclass(frozen=True)
class Frame:
    """Fractional coordinates of positions, and how far a distance reaches in them."""

    inverse: Tensor  # (3, 3)
    width: Tensor  # (3), between opposite faces
    repeats: Tensor  # (3) bool

    @classmethod
    def of(cls, cell: Tensor | None, pbc: cells.Periodic) -> Frame:
        """cell: (1, 3, 3) or None."""
        full = torch.eye(3, dtype=torch.float64) if cell is None else cells.complete(cell[0], pbc)
        return cls(torch.linalg.inv(full), cells.widths(full), torch.tensor(pbc))

    def coordinates(self, positions: Tensor, leader: Tensor) -> Tensor:
        """Fractional coordinates (n, 3) of positions (n, 3). leader (n): for each atom, the one whose image in the cell
        is taken: atoms that belong together stay together."""
        s = positions @ self.inverse
        return s - torch.where(self.repeats, s[leader].floor(), 0.0)


@dataclass(frozen=True)
class Domains:
    """The boxes of a grid (a, b, c) of processes. cuts: fractional coordinates of the cuts across axis 0 (a - 1), axis
    1 (a, b - 1) and axis 2 (a, b, c - 1)."""

    grid: tuple[int, int, int]
    cuts: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def of(cls, grid: tuple[int, int, int], coordinates: Tensor) -> Domains:
        """Cuts at quantiles of coordinates (N, 3)."""
        a, b, c = grid
        first = _quantiles(coordinates[:, 0], a)
        slab = torch.bucketize(coordinates[:, 0].contiguous(), first, right=True)
        second = torch.stack([_quantiles(coordinates[slab == i, 1], b) for i in range(a)])
        column = _place(coordinates[:, 1], second[slab])
        third = [[_quantiles(coordinates[(slab == i) & (column == j), 2], c) for j in range(b)] for i in range(a)]
        return cls(grid, (first, second, torch.stack([torch.stack(row) for row in third])))

    def owner(self, coordinates: Tensor) -> Tensor:
        """(n) int64: the process of each place (n, 3)."""
        x, y, z = coordinates.T
        first, second, third = self.cuts
        i = torch.bucketize(x.contiguous(), first, right=True)
        j = _place(y, second[i])
        return (i * self.grid[1] + j) * self.grid[2] + _place(z, third[i, j])


def _quantiles(values: Tensor, parts: int) -> Tensor:
    """(parts - 1) places that divide values into parts of equal number, halfway between two of them; infinite if there
    are too few values."""
    if len(values) < parts:
        return torch.full((parts - 1,), torch.inf, dtype=torch.float64)
    ordered = values.sort().values
    at = torch.arange(1, parts) * len(values) // parts
    return (ordered[at - 1] + ordered[at]) / 2


def _place(values: Tensor, cuts: Tensor) -> Tensor:
    """(n): how many cuts (n, m) lie at or below values (n)."""
    return (values[:, None] >= cuts).sum(1)


@dataclass(frozen=True)
class Estimate:
    """The cost of a grid of domains: atoms that a process owns, and copies of atoms of others that it needs, if they
    are spread evenly."""

    grid: tuple[int, int, int]
    owned: float
    copies: float


def estimates(system: System, reach: float, processes: int) -> list[Estimate]:
    """Grids of so many processes, the one with the fewest copies first. reach: cutoff and skin."""
    frame = Frame.of(system.cell, system.pbc)
    s = system.positions[0] @ frame.inverse
    spread = torch.where(frame.repeats, 1.0, s.amax(0) - s.amin(0))
    edges = (spread * frame.width).clamp(min=1e-9).tolist()
    grids = []
    divisors = [n for n in range(1, processes + 1) if processes % n == 0]
    for a, b in itertools.product(divisors, repeat=2):
        if processes % (a * b):
            continue
        grid = a, b, processes // (a * b)
        box = [x / n for x, n in zip(edges, grid, strict=True)]
        halo = [min(x + 2 * reach, edge) for x, edge in zip(box, edges, strict=True)]
        owned = system.atoms / processes
        grids.append(Estimate(grid, owned, owned * (math.prod(halo) / math.prod(box) - 1)))
    return sorted(grids, key=lambda x: (x.copies, x.grid))


def divided(
    system: System, coordinates: Tensor, reach: float, processes: int, grid: Sequence[int] | None = None
) -> tuple[Estimate, Domains]:
    """The grid that needs the fewest copies of those whose boxes all have atoms, or the one given; and its cuts.

    coordinates: (N, 3), that decide to which box each atom belongs. Raises ValueError if there is no such grid.
    """
    candidates = estimates(system, reach, processes)
    if grid is not None and not any(estimate.grid == tuple(grid) for estimate in candidates):
        raise ValueError(f"the grid {tuple(grid)} has {math.prod(grid)} boxes, but there are {processes} processes")
    for estimate in candidates:
        if grid is None or estimate.grid == tuple(grid):
            domains = Domains.of(estimate.grid, coordinates)
            if int(torch.bincount(domains.owner(coordinates), minlength=processes).min()):
                return estimate, domains
    raise ValueError(
        f"{len(coordinates)} atoms cannot be divided among {processes} processes so that each has some; take fewer"
        " processes"
    )
