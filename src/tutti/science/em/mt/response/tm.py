"""Transverse magnetic polarisation: H along strike, below the surface only.

    div (rho grad H) = i w mu0 H,    H = 1 at the surface,    rho dH/dz = -rho k H at the bottom,

k = sqrt(i w mu0 / rho), on nodes, by finite volumes; no flux through the sides. E at the surface comes from the balance
of the half cell below it, of second order: E = -(rho (H1 - H0)/h - i w mu0 h/2 H0). H is constant there, so no flux
is lateral. The phase of E/H is in the first quadrant, as in TE: with x along strike, y along the profile it is -Zyx.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from tutti.science.em.mt.mesh import Mesh2D
from tutti.science.em.mt.response.stencil import (
    LN10,
    Readout,
    Stencil,
    dual,
    last_row,
    on_nodes,
    pair,
    stiffness_of,
    surface_mean,
)


class TM:
    """The TM equations on a mesh, seen at sites. interpolation: matrix from nodes to sites (site, nx + 1)."""

    surface = 0

    def __init__(self, mesh: Mesh2D, interpolation: Tensor, device: torch.device) -> None:
        dx, dz = mesh.dx, mesh.dz
        self.h = float(dz[0])
        self.dx, self.at, self.mean = dx.to(device), interpolation.to(device), surface_mean(mesh).to(device)
        self.flat, self.steep = (dz[:, None] / dx / 2).to(device), (dx / dz[:, None] / 2).to(device)
        self.volume = (dual(dz)[:, None] * dual(dx)).to(device)

    def stencil(self, log_rho: Tensor) -> Stencil:
        """log_rho: (nz, nx). Surface nodes have an equation of their own, H = 1."""
        rho = 10**log_rho
        horizontal = pair(pad(rho * self.flat, (0, 0, 1, 1)), 0)
        vertical = pair(pad(rho * self.steep, (1, 1)), 1)
        horizontal[0] = 0
        stiffness, mass = stiffness_of(horizontal, vertical), self.volume.clone()
        vertical[0] = mass[0] = 0  # stiffness[0] stays: it scales the equation
        robin = on_nodes((rho[-1].sqrt() * self.dx / 2)[None])[0]
        return Stencil(stiffness, mass, last_row(robin, len(mass)), horizontal, vertical)

    def rhs(self, stencil: Stencil, iwmu: Tensor) -> Tensor:
        """(b, nodes in z, nodes in x)."""
        out = stencil.mass.new_zeros(len(iwmu), *stencil.mass.shape, dtype=iwmu.dtype)
        out[:, :2] = stencil.stiffness[0]  # the coupling of the first two rows
        return out

    def corners(self, u: Tensor, log_rho: Tensor, iwmu: Tensor) -> Tensor:
        """Derivatives of A u by the log10 resistivity of each cell, (b, 4, nz, nx). Void on surface nodes."""
        rho = 10**log_rho
        right = LN10 * rho * self.flat * u.diff(dim=2)[:, :-1], LN10 * rho * self.flat * u.diff(dim=2)[:, 1:]
        down = LN10 * rho * self.steep * u.diff(dim=1)[..., :-1], LN10 * rho * self.steep * u.diff(dim=1)[..., 1:]
        upper_left, upper_right = -right[0] - down[0], right[0] - down[1]
        lower_left, lower_right = -right[1] + down[0], right[1] + down[1]
        bottom = LN10 / 2 * rho[-1].sqrt() * self.dx / 2 * iwmu.sqrt()[:, None]
        lower_left[:, -1] += bottom * u[:, -1, :-1]
        lower_right[:, -1] += bottom * u[:, -1, 1:]
        return torch.stack([upper_left, upper_right, lower_left, lower_right], 1)

    def readout(self, u: Tensor, log_rho: Tensor, iwmu: Tensor, log: bool) -> Readout:
        """ln Z of all sites, or Z in ohm, if not `log`."""
        rho, p, h = 10 ** log_rho[0], self.at, self.h
        below = -p * (self.mean @ rho) / h  # dE/dH1
        drop = u[:, 1] - u[:, 0]
        z = drop @ below.to(u.dtype).T + h / 2 * iwmu[:, None]
        explicit = torch.einsum("rx,bx,xc->brc", (-p / h).to(u.dtype), drop, (self.mean * (LN10 * rho)).to(u.dtype))
        rows = p.new_zeros(len(u), len(p), 2, u.shape[-1], dtype=u.dtype)
        rows[:, :, 1] = below
        if log:
            return Readout(z.log(), rows / z[..., None, None], explicit / z[..., None])
        return Readout(z, rows, explicit)
