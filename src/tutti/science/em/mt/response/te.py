"""Transverse electric polarisation: E along strike, from a current sheet over air and earth.

    div grad E = i w mu0 sigma E,    dE/dz = -i w mu0 at the top of the air,    dE/dz = -k E at the bottom,

k = sqrt(i w mu0 sigma), on nodes, by finite volumes; no flux through the sides. H at the surface comes from the balance
of the half cell below it, of second order: H = [(E1 - E0)/h + lateral flux - i w mu0 sigma h/2 E0] / (-i w mu0).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.science.em.mt.mesh import Mesh2D
from tutti.science.em.mt.response.stencil import (
    CORNERS,
    LN10,
    Readout,
    Stencil,
    dual,
    last_row,
    on_nodes,
    stiffness_of,
    surface_mean,
)

AIR = 1e-9  # S/m
AIR_GROWTH, AIR_LAYERS = 2.4, 12


def air_layers(first: float, height: float) -> Tensor:
    """Thicknesses from the surface upwards: at least 12, each 2.4 times the one below, to this height in metres."""
    layers = [first]
    while len(layers) < AIR_LAYERS or sum(layers) < height:
        layers.append(layers[-1] * AIR_GROWTH)
    return torch.tensor(layers, dtype=torch.float64)


class TE:
    """The TE equations on a mesh under air of this height (m), seen at sites.

    interpolation: matrix from nodes to sites (site, nx + 1). channels: what is read, of "impedance" and "tipper".
    """

    def __init__(self, mesh: Mesh2D, interpolation: Tensor, air: float, channels: tuple[str, ...],
                 device: torch.device) -> None:  # fmt: skip
        dx = mesh.dx
        layers = air_layers(float(mesh.dz[0]), air)
        dz = torch.cat([layers.flip(0), mesh.dz])
        self.channels, self.surface, self.h = channels, len(layers), float(mesh.dz[0])
        self.dx, self.mean = dx.to(device), surface_mean(mesh).to(device)
        self.area = (mesh.dz[:, None] * dx).to(device)
        self.air_area = (layers.flip(0)[:, None] * dx).to(device)
        self.source = dual(dx).to(device)
        self.horizontal = (dual(dz)[:, None] / dx).to(device)
        self.vertical = (dual(dx) / dz[:, None]).to(device)
        slope = torch.diff(torch.eye(len(dx) + 1, dtype=torch.float64), dim=0) / dx[:, None]  # of columns (nx, nx + 1)
        flux = torch.diff(slope, dim=0, prepend=0 * slope[:1], append=0 * slope[:1])
        lateral = self.h / 2 * flux / dual(dx)[:, None]
        inner = (dx[1:, None] * slope[:-1] + dx[:-1, None] * slope[1:]) / (dx[1:] + dx[:-1])[:, None]
        along = torch.cat([0 * slope[:1], inner, 0 * slope[:1]])  # dE/dx on nodes
        self.at = interpolation.to(device)
        self.lateral, self.along = (interpolation @ lateral).to(device), (interpolation @ along).to(device)

    def stencil(self, log_rho: Tensor) -> Stencil:
        """log_rho: (nz, nx) of the earth."""
        sigma = 10**-log_rho
        nodes = on_nodes(torch.cat([AIR * self.air_area, sigma * self.area]) / 4)
        robin = on_nodes((sigma[-1].sqrt() * self.dx / 2)[None])[0]
        stiffness = stiffness_of(self.horizontal, self.vertical)
        return Stencil(stiffness, nodes, last_row(robin, len(nodes)), self.horizontal, self.vertical)

    def rhs(self, stencil: Stencil, iwmu: Tensor) -> Tensor:
        """(b, nodes in z, nodes in x)."""
        out = stencil.mass.new_zeros(len(iwmu), *stencil.mass.shape, dtype=iwmu.dtype)
        out[:, 0] = iwmu[:, None] * self.source
        return out

    def corners(self, u: Tensor, log_rho: Tensor, iwmu: Tensor) -> Tensor:
        """Derivatives of A u by the log10 resistivity of each cell of the earth, (b, 4, nz, nx)."""
        earth, s = u[:, self.surface :], iwmu[:, None, None]
        sigma = 10**-log_rho
        factor = -LN10 * sigma * self.area / 4 * s
        bottom = -LN10 / 2 * sigma[-1].sqrt() * self.dx / 2 * iwmu.sqrt()[:, None]
        out = torch.stack([factor * earth[:, *at] for at in CORNERS], 1)
        out[:, 2, -1] += bottom * earth[:, -1, :-1]
        out[:, 3, -1] += bottom * earth[:, -1, 1:]
        return out

    def readout(self, u: Tensor, log_rho: Tensor, iwmu: Tensor, log: bool) -> Readout:
        """ln Z (or Z in ohm, if not `log`), then the tipper Hz/H, of all sites."""
        s = iwmu[:, None, None]
        sigma = 10 ** -log_rho[0]
        p, u0, h = self.at, u[:, self.surface], self.h
        rows = p.new_zeros(len(u), 3, len(p), 2, u.shape[-1], dtype=u.dtype)  # of E, H, Hz
        rows[:, 0, :, 0] = p
        rows[:, 1, :, 0] = (p / h - self.lateral) / s + h / 2 * p * (self.mean @ sigma)
        rows[:, 1, :, 1] = -p / h / s
        rows[:, 2, :, 0] = self.along / s
        e, hy, hz = torch.einsum("bkrsx,bsx->kbr", rows, u[:, self.surface : self.surface + 2])
        explicit_h = h / 2 * torch.einsum("rx,bx,xc->brc", p.to(u.dtype), u0, (self.mean * (-LN10 * sigma)).to(u.dtype))
        explicit_h, by_h = explicit_h / hy[..., None], rows[:, 1] / hy[..., None, None]  # of ln H
        parts_of_modes = []
        for channel in self.channels:
            if channel == "impedance":
                z = e / hy
                scale = torch.ones_like(z) if log else z
                row = (rows[:, 0] / e[..., None, None] - by_h) * scale[..., None, None]
                parts_of_modes.append((z.log() if log else z, row, -explicit_h * scale[..., None]))
            else:
                t = hz / hy
                row = rows[:, 2] / hy[..., None, None] - t[..., None, None] * by_h
                parts_of_modes.append((t, row, -t[..., None] * explicit_h))
        return Readout(*(torch.cat(parts, 1) for parts in zip(*parts_of_modes, strict=True)))
