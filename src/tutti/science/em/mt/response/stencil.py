"""What the two polarisations share: the five-point matrix, sites between columns, and derivatives cell by cell.

Fields live on nodes, arrays of shape (nz + 1, nx + 1). The matrix of finite volumes at angular frequency w is

    A(w) = K + i w mu0 diag(mass) + sqrt(i w mu0) diag(robin)

with real K, mass and robin: only two scalars depend on the frequency. The derivative of A u by the log10 resistivity of
a cell has four entries, at the corners of the cell: `corners` in the order upper left, upper right, lower left, lower
right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from tutti.science.em.mt.mesh import Mesh2D

LN10 = math.log(10)
CORNERS = tuple((slice(i, -1 + i or None), slice(j, -1 + j or None)) for i in (0, 1) for j in (0, 1))
GRAIN = 32768  # elements from which torch starts threads on a CPU


@dataclass(frozen=True)
class Stencil:
    """A symmetric five-point matrix; all float64."""

    stiffness: Tensor  # diagonal of K (nz + 1, nx + 1)
    mass: Tensor  # (nz + 1, nx + 1)
    robin: Tensor  # (nz + 1, nx + 1), zero but in the last row
    horizontal: Tensor  # couplings of horizontal neighbours (nz + 1, nx); entries of K are -coupling
    vertical: Tensor  # (nz, nx + 1)

    def diagonal(self, iwmu: Tensor) -> Tensor:
        """The diagonal of A at each frequency. iwmu: i w mu0 (b), complex128. Returns (b, nz + 1, nx + 1)."""
        s = iwmu[:, None, None]
        return self.stiffness + s * self.mass + s.sqrt() * self.robin


@dataclass(frozen=True)
class Readout:
    """What the sites see: complex quantities q, and their derivatives by field and model."""

    value: Tensor  # q (b, r)
    rows: Tensor  # dq/du on the surface row of nodes and the one below (b, r, 2, nx + 1)
    explicit: Tensor  # dq/dlog10 rho of the first row of cells at constant u (b, r, nx)


def stiffness_of(horizontal: Tensor, vertical: Tensor) -> Tensor:
    """The diagonal of K: each node couples to its neighbours, and to nothing at the edges (Neumann)."""
    return pad(horizontal, (1, 0)) + pad(horizontal, (0, 1)) + pad(vertical, (0, 0, 1, 0)) + pad(vertical, (0, 0, 0, 1))


def dual(d: Tensor) -> Tensor:
    """Widths of the volumes round nodes: half of each adjacent cell. (n) -> (n + 1)."""
    return pad(d / 2, (1, 0)) + pad(d / 2, (0, 1))


def on_nodes(cells: Tensor) -> Tensor:
    """The sum of the adjacent cells at each node. (..., nz, nx) -> (..., nz + 1, nx + 1)."""
    return pair(pair(pad(cells, (1, 1, 1, 1)), -1), -2)


def pair(x: Tensor, dim: int) -> Tensor:
    """Sums of neighbours along a dim."""
    return x.narrow(dim, 0, x.shape[dim] - 1) + x.narrow(dim, 1, x.shape[dim] - 1)


def last_row(row: Tensor, rows: int) -> Tensor:
    """(..., n) as the last of `rows` rows, over zeros."""
    return pad(row[..., None, :], (0, 0, rows - 1, 0))


def interpolation(mesh: Mesh2D, sites: Sequence[float]) -> Tensor:
    """Linear interpolation from nodes to sites (m): (site, nx + 1). Raises ValueError outside of the mesh."""
    edges = torch.tensor(mesh.x_edges, dtype=torch.float64)
    x = torch.tensor(sites, dtype=torch.float64)
    outside = ~((x >= edges[0]) & (x <= edges[-1]))
    if outside.any():
        raise ValueError(
            f"sites {x[outside].tolist()} (m) are outside of the mesh, which spans {mesh.x_edges[0]:g} to"
            f" {mesh.x_edges[-1]:g} m; Mesh2D.for_survey(frequencies, sites, rho_range) makes one that covers them"
        )
    left = (torch.searchsorted(edges, x, right=True) - 1).clamp(0, mesh.nx - 1)
    weight = (x - edges[left]) / (edges[left + 1] - edges[left])
    p = torch.zeros(len(x), mesh.nx + 1, dtype=torch.float64)
    p.scatter_(1, left[:, None], (1 - weight)[:, None])
    return p.scatter_add_(1, left[:, None] + 1, weight[:, None])


def surface_mean(mesh: Mesh2D) -> Tensor:
    """The mean of the two cells beside each surface node, weighted by width: (nx + 1, nx)."""
    half = mesh.dx / 2
    eye = torch.eye(mesh.nx, dtype=torch.float64)
    return (pad(eye, (0, 0, 1, 0)) + pad(eye, (0, 0, 0, 1))) * half / dual(mesh.dx)[:, None]


def contract(g: Tensor, corners: Tensor) -> Tensor:
    """The sum over corners of g at the corner times its entry: g^T (dA/dm u) for each cell.

    g: (b, r, nz + 1, nx + 1). corners: (b, 4, nz, nx). Returns (b, r, nz, nx).
    """
    b, r = g.shape[:2]
    out = g.new_empty(b, r, *corners.shape[2:])
    few = r if g.is_cuda else max(GRAIN // corners[0, 0].numel(), 1)
    for i in range(0, r, few):
        into, part = out[:, i : i + few], g[:, i : i + few]
        torch.mul(part[..., *CORNERS[0]], corners[:, None, 0], out=into)
        for c in (1, 2, 3):
            into.addcmul_(part[..., *CORNERS[c]], corners[:, None, c])
    return out


def spread(corners: Tensor, cells: Tensor) -> Tensor:
    """The transpose of `contract`: (dA/dm u) times a change of each cell. Returns (b, nz + 1, nx + 1)."""
    b, _, nz, nx = corners.shape
    out = corners.new_zeros(b, nz + 1, nx + 1)
    for c, at in enumerate(CORNERS):
        out[:, *at] += corners[:, c] * cells
    return out
