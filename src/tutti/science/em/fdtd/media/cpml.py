"""Convolutional perfectly matched layers (J. A. Roden and S. D. Gedney, Microw. Opt. Technol. Lett. 27, 334, 2000).

A derivative d along an axis becomes d / kappa + psi, psi = b psi + a d / kappa, with

    b = exp(-(sigma / kappa + alpha) dt / eps0),  a = (b - 1) sigma / (sigma + alpha kappa),

sigma = factor sigma_opt rho^order, sigma_opt = (order + 1) / (150 pi sqrt(eps_r) delta), kappa = 1 + (kappa_max - 1)
rho^order, alpha = alpha_max (1 - rho), where rho is the depth over the thickness.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, inf, pi, sqrt

import torch
from torch import Tensor

from tutti.science.em.fdtd.grid import EPS0, Grid

VECTOR = 16  # layers along the contiguous axis have as many rows, with zeros, as a multiple of this


@dataclass(frozen=True)
class CPML:
    """Layers of `cells` cells inside of a grid: one number, or for each axis one or (low, high); 0 is a wall.

    alpha: in S/m; it helps against evanescent fields, and spoils frequencies below alpha / (2 pi eps0).
    eps_r: permittivity of the medium that touches them. offset: by how many cells they begin earlier.
    """

    cells: int | tuple = 10
    order: float = 4
    factor: float = 1.0
    kappa: float = 5.0
    alpha: float = 0.0
    eps_r: float = 1.0
    offset: float = 0.0

    def __post_init__(self) -> None:
        for x in self.cells if isinstance(self.cells, tuple) else (self.cells,):
            ends = x if isinstance(x, tuple) else (x, x)
            if len(ends) != 2 or not all(isinstance(n, int) and n >= 0 for n in ends):
                raise ValueError(f"cells of absorbing layers: whole numbers, or pairs by axis, not {self.cells}")
        for name, least in (("order", 0), ("factor", 0), ("kappa", 1), ("alpha", 0), ("offset", 0)):
            if not least <= getattr(self, name) < inf:
                raise ValueError(f"{name} of absorbing layers: at least {least}, not {getattr(self, name)}")
        if not 0 < self.eps_r < inf:
            raise ValueError(f"eps_r of absorbing layers: positive, not {self.eps_r}")

    def thickness(self, axis: int) -> tuple[int, int]:
        """Cells of the layers at the low and the high end of an axis."""
        of_axis = self.cells[axis] if isinstance(self.cells, tuple) else self.cells
        return (of_axis, of_axis) if isinstance(of_axis, int) else tuple(of_axis)  # pyright: ignore


@dataclass(frozen=True)
class Lines:
    """Numbers along one axis, for E or H, in float64. `at`: the row of a place in `decay` and `drive`, or -1."""

    w: Tensor
    decay: Tensor
    drive: Tensor
    at: Tensor
    ends: tuple[int, int, int, int]

    @property
    def absorbs(self) -> Tensor:
        """Whether a place lies in a layer. There are rows of zeros beside those of layers."""
        return (self.at >= 0) & (torch.cat([self.drive, self.drive.new_zeros(1)])[self.at] != 0)


@lru_cache(64)
def lines(grid: Grid, layers: CPML | None, axis: int, dt: float, electric: bool) -> Lines:
    """The coefficients of the absorbing layers along an axis of the grid. Raises ValueError if layers do not fit."""
    n, delta = grid.shape[axis], grid.lengths[axis]
    place = torch.arange(n + 1, dtype=torch.float64) + (0.0 if electric else 0.5)
    decay, drive, kappa = torch.zeros(n + 1).double(), torch.zeros(n + 1).double(), torch.ones(n + 1).double()
    low, high = layers.thickness(axis) if layers else (0, 0)
    if low + high > n:
        raise ValueError(f"absorbing layers of {low} and {high} cells do not fit in {n} cells along {'xyz'[axis]}")
    padded = grid.axes[axis] == 2 and all(2 * VECTOR * ceil((x + 1) / VECTOR) <= n + 1 for x in (low, high))
    inside, ends = torch.zeros(n + 1, dtype=torch.bool), []
    for side, cells in enumerate((low, high)):
        depth = (cells - place if side == 0 else place - (n - cells)) + (layers.offset if layers and cells else 0)
        here = (depth > 0) & (place > 0) & (place < n)
        if not layers or not here.any():
            ends += [0, 0]
            continue
        if (inside & here).any():
            raise ValueError(f"absorbing layers of {low} and {high} cells that begin {layers.offset:g} cells earlier "
                             f"overlap in {n} cells along {'xyz'[axis]}")  # fmt: skip
        rho = (depth / cells).clamp(0, 1)
        sigma = layers.factor * (layers.order + 1) / (150 * pi * sqrt(layers.eps_r) * delta) * rho**layers.order
        k = 1 + (layers.kappa - 1) * rho**layers.order
        alpha = layers.alpha * (1 - rho)
        b = torch.exp(-(sigma / k + alpha) * dt / EPS0)
        a = (b - 1) * sigma / (sigma + alpha * k).clamp(min=1e-300)
        decay, drive, kappa = torch.where(here, b, decay), torch.where(here, a, drive), torch.where(here, k, kappa)
        where = here.nonzero().flatten()
        first, last = int(where[0]), int(where[-1]) + 1
        if padded:
            whole = VECTOR * ceil((last if side == 0 else n + 1 - first) / VECTOR)
            first, last = (0, whole) if side == 0 else (n + 1 - whole, n + 1)
        inside[first:last] = True
        ends += [first, last]
    at = torch.where(inside, inside.cumsum(0) - 1, -1)
    return Lines(1 / (kappa * delta), decay[inside].clone(), drive[inside].clone(), at, tuple(ends))  # pyright: ignore
