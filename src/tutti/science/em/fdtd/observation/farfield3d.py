"""From the scattered field around an object to its far field, in three dimensions.

On a closed surface with outward normal n flow the currents J = n x H and M = - n x E. With r a unit vector, r' from the
centre, and time factor exp(+i w t), the scattered field is E = F(r) exp(- i k R) / R,

    F = - i k / (4 pi) (eta0 (N - r (r . N)) + L x r),  N, L = integral of J, M exp(i k r . r') dS

(A. Taflove and S. Hagness, Computational Electrodynamics, 3rd ed., section 8.5). The surface lies in planes of nodes,
with tangential E; H is the mean of both sides. Each component is integrated at its own places.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import pi

import torch
from torch import Tensor

from tutti.science.em.fdtd.grid import C0, ETA0, Grid
from tutti.science.em.fdtd.observation.monitors import Side
from tutti.science.em.fdtd.simulation import Result
from tutti.science.em.shown import brief

Box = Sequence[tuple[int, int]]


def surface3d(box: Box, frequencies: Tensor) -> list[Side]:
    """Monitors on the six sides of a box of nodes: (first, last) by axis. frequencies: Hz.

    The box encloses what scatters and the box of a plane wave, and lies outside of absorbing layers; simulations raise
    ValueError for others.
    """
    Side.check(box, 3)
    out = []
    for axis in range(3):
        for side, at in enumerate(box[axis]):
            for d in range(3):
                if d == axis:
                    continue
                for kind, planes in (("E", (0,)), ("H", (-1, 0))):
                    where: list[int | slice] = []
                    for a, (first, last) in enumerate(box):
                        node = (a != d) == (kind == "E")
                        where.append(slice(first, last + 1 if node else last))
                    for plane in planes:
                        where[axis] = at + plane
                        name = f"far {axis} {side} {kind}{'xyz'[d]} {plane}"
                        out.append(Side(name, kind + "xyz"[d], tuple(where), frequencies, box=box))
    return out


def amplitude(box: Box, result: Result, frequencies: Tensor, directions: Tensor, centre: Sequence[float]) -> Tensor:
    """F of the spectra, in V s: complex128 (frequencies, directions, 3).

    box, frequencies: those of the run's `surface3d`. directions: unit vectors (directions, 3). centre: what phases
    refer to, in cells from the first node. Raises ValueError for what the run has not recorded.
    """
    Side.recorded(result.monitors, box, frequencies)
    if directions.ndim != 2 or directions.shape[1] != 3 or bool(((directions.norm(dim=1) - 1).abs() > 1e-3).any()):
        raise ValueError(f"directions: unit vectors (directions, 3), not {brief(directions)}")
    grid = result.grid
    k = 2 * pi * frequencies.double() / C0
    r = directions.double()
    n, l = (torch.zeros(len(k), len(r), 3, dtype=torch.complex128) for _ in range(2))  # noqa: E741
    for axis in range(3):
        for side in (0, 1):
            normal = torch.zeros(3, dtype=torch.float64)
            normal[axis] = 1.0 if side else -1.0
            offset = (box[axis][side] - centre[axis]) * grid.lengths[axis]
            for d in range(3):
                if d == axis:
                    continue
                for kind, planes in (("E", (0,)), ("H", (-1, 0))):
                    x = sum(result[f"far {axis} {side} {kind}{'xyz'[d]} {p}"] for p in planes) / len(planes)
                    assert isinstance(x, Tensor)
                    x = integral(grid, box, x.to(torch.complex128), kind, d, axis, k, r, centre)
                    x = x * torch.exp(1j * k[:, None] * r[:, axis] * offset)
                    unit = torch.zeros(3, dtype=torch.float64)
                    unit[d] = 1.0
                    current = torch.linalg.cross(normal, unit) * (1 if kind == "H" else -1)
                    (n if kind == "H" else l).add_(x[..., None] * current)
    along = (n * r).sum(-1, keepdim=True) * r
    return -1j * k[:, None, None] / (4 * pi) * (ETA0 * (n - along) + torch.linalg.cross(l, r.expand_as(l).to(l.dtype)))


def integral(grid: Grid, box: Box, x: Tensor, kind: str, d: int, axis: int, k: Tensor, r: Tensor,
             centre: Sequence[float]) -> Tensor:  # fmt: skip
    """The integral of x exp(i k r . r') over a side across `axis`, (frequencies, directions): trapezoids and
    midpoints."""
    for a in sorted({0, 1, 2} - {axis}, reverse=True):
        first, last = box[a]
        node = (a != d) == (kind == "E")
        place = torch.arange(first, last + 1, dtype=torch.float64) if node else torch.arange(first, last).double() + 0.5
        weight = torch.full_like(place, grid.lengths[a])
        if node:
            weight[0] = weight[-1] = grid.lengths[a] / 2
        at = (place - centre[a]) * grid.lengths[a]
        factor = torch.exp(1j * k[:, None, None] * r[:, a, None] * at) * weight  # (frequencies, directions, places)
        x = torch.einsum("fuv,fdv->fdu", x, factor) if a == max({0, 1, 2} - {axis}) else (x * factor).sum(-1)
    return x


def cross_section(f: Tensor, incident: Tensor) -> Tensor:
    """The radar cross-section 4 pi |F|^2 / |E0|^2 in m^2 (frequencies, directions). incident: E0 (frequencies)."""
    return 4 * pi * f.abs().square().sum(-1) / incident.abs().square()[:, None]


def extinction(f: Tensor, frequencies: Tensor, polarization: int, incident: Tensor) -> Tensor:
    """The extinction cross-section in m^2 by the optical theorem, - 4 pi / k Im(F . p / E0).

    f: F forward, (frequencies, 3). polarization: axis of E. incident: E0 at the centre of F's phases, complex.
    """
    return -4 * pi / (2 * pi * frequencies.double() / C0) * (f[:, polarization] / incident).imag
