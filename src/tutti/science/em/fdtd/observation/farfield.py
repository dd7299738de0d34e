"""From the scattered field around an object to its far field, in two dimensions with Ez (TM).

By Green's theorem over a closed line with outward normal n, time factor exp(+i w t),

    k sigma(phi) = |sum (i k (r . n) Ez - dEz/dn) exp(i k r . r') dl|^2 / (4 |E0|^2),

r = (cos phi, sin phi); dEz/dx = i w mu0 Hy and dEz/dy = - i w mu0 Hx, as means of both sides of the line.
"""

from __future__ import annotations

from math import pi

import torch
from torch import Tensor

from tutti.science.em.fdtd.grid import C0, MU0
from tutti.science.em.fdtd.observation.monitors import Side
from tutti.science.em.fdtd.simulation import Result


def surface(box: tuple[tuple[int, int], tuple[int, int]], frequencies: Tensor) -> list[Side]:
    """Monitors on the four sides of a box of nodes of a TM grid: (first, last) by axis. frequencies: Hz.

    The box encloses what scatters and the box of a plane wave, and lies outside of absorbing layers; simulations raise
    ValueError for others, and on a TE grid.
    """
    Side.check(box, 2)
    (x0, x1), (y0, y1) = box
    out = []
    for axis, (fixed, (first, last)) in enumerate((((x0, x1), (y0, y1)), ((y0, y1), (x0, x1)))):
        for side, at in enumerate(fixed):
            for name, component, shift in (("e", "Ez", 0), ("before", "Hy" if axis == 0 else "Hx", -1),
                                           ("after", "Hy" if axis == 0 else "Hx", 0)):  # fmt: skip
                across = slice(first, last + 1)
                where = (at + shift, across) if axis == 0 else (across, at + shift)
                out.append(Side(f"far {axis} {side} {name}", component, where, frequencies, box=box))
    return out


def scattering_width(box: tuple[tuple[int, int], tuple[int, int]], result: Result, frequencies: Tensor,
                     angles: Tensor, incident: Tensor) -> Tensor:  # fmt: skip
    """k sigma, a number without unit: float64 (frequencies, angles).

    box, frequencies: those of the run's `surface`. angles: rad from x. incident: the spectrum of the incident field in
    V s/m, or its magnitude (frequencies), as of `PlaneWave.spectrum`. Raises ValueError for what the run has not
    recorded.
    """
    Side.recorded(result.monitors, box, frequencies)
    if tuple(incident.shape) != (len(frequencies),):
        raise ValueError(f"incident: a number for each of {len(frequencies)} frequencies, not {tuple(incident.shape)}")
    grid = result.grid
    omega = 2 * pi * frequencies.double()
    k = omega / C0
    r = torch.stack([torch.cos(angles.double()), torch.sin(angles.double())])
    total = torch.zeros(len(frequencies), len(angles), dtype=torch.complex128)
    for axis in (0, 1):
        other = 1 - axis
        first, last = box[other]
        along = torch.arange(first, last + 1, dtype=torch.float64) * grid.lengths[other]
        weight = torch.full_like(along, grid.lengths[other])
        weight[0] = weight[-1] = grid.lengths[other] / 2
        for side in (0, 1):
            e, before, after = (result[f"far {axis} {side} {x}"].to(torch.complex128) for x in ("e", "before", "after"))
            normal = 1.0 if side else -1.0
            slope = 1j * omega[:, None] * MU0 * (before + after) / 2 * (1 if axis == 0 else -1) * normal
            at = box[axis][side] * grid.lengths[axis]
            phase = torch.exp(1j * k[:, None, None] * (r[axis, :, None] * at + r[other, :, None] * along))
            cosine = (r[axis] * normal)[None, :, None]
            total += ((1j * k[:, None, None] * cosine * e[:, None] - slope[:, None]) * phase * weight).sum(-1)
    return total.abs().square() / (4 * incident.abs().double().square()[:, None])
