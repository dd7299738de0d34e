"""A filter of three dielectric posts in a rectangular waveguide: the field of its mode TE10 has no variation along
the posts, so that a simulation in two dimensions is exact.

WR-90: 22.86 mm wide, 8.2 to 12.4 GHz. Posts stand on the axis at -spacing, 0 and spacing. S is taken from the amplitude
of the mode, sin(pi y / a), at two planes, against a run of the empty guide, and referred to the plane of the middle
post by the propagation constant sqrt(k^2 - (pi / a)^2).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import pi

import torch
from torch import Tensor

from tutti.science.em.fdtd import CPML, Current, Grid, Simulation, Snapshots, pulse
from tutti.science.em.fdtd.grid import C0
from tutti.science.em.surrogate.geometry import Geometry
from tutti.science.em.surrogate.parameters import Parameter, Space

WIDTH = 22.86e-3
SPACE = Space((
    Parameter("outer_radius", 1.5e-3, 3e-3, "m"),
    Parameter("inner_radius", 1.5e-3, 3e-3, "m"),
    Parameter("spacing", 9e-3, 18e-3, "m"),
    Parameter("outer_eps", 3.0, 7.0),
    Parameter("inner_eps", 3.0, 7.0),
))  # fmt: skip
FREQUENCIES = torch.linspace(8.2e9, 12.4e9, 85, dtype=torch.float64)
LAYERS, HALF = 40, 30e-3  # cells of absorbing layers; from the middle to the planes, m
STEPS = 250  # for each cell across the guide


def simulation(cells: int) -> tuple[Simulation, float]:
    """The guide, `cells` wide, and half its length in m."""
    delta = WIDTH / cells
    half = round(HALF / delta)
    n = 2 * (half + LAYERS + 10)
    source = Current("Ez", (LAYERS + 4, slice(1, cells)), pulse(10.3e9, 1.7e9))
    planes = [Snapshots(name, "Ez", (at, slice(0, cells + 1)))
              for name, at in (("in", n // 2 - half), ("out", n // 2 + half))]  # fmt: skip
    layers = CPML((LAYERS, 0), order=3, factor=1.0, kappa=1.0)
    return Simulation(Grid((n, cells), delta), layers, [source], planes, courant=0.95), half * delta


def permittivity(grid: Grid, discs: list[tuple[float, float, float]]) -> Tensor:
    """eps_r of cells: discs (x in m from the middle, radius in m, eps_r) on the axis, smoothed over a cell at rims."""
    delta = grid.lengths[0]
    x, y = ((torch.arange(n, dtype=torch.float64) + 0.5 - n / 2) * delta for n in grid.shape)
    eps = torch.ones(grid.shape, dtype=torch.float64)
    for x0, radius, eps_r in discs:
        distance = torch.hypot(x[:, None] - x0, y[None])
        eps += (eps_r - 1) * ((radius - distance) / delta + 0.5).clamp(0, 1)
    return eps


def spectra(model: Simulation, eps: Tensor | float, steps: int) -> Tensor:
    """Amplitudes of the mode at both planes: complex (2, frequencies).

    The second half of the time fades out: posts trap a mode below the cutoff, which rings on.
    """
    result = model.run(eps, steps)
    cells = model.grid.shape[1]
    mode = torch.sin(pi * torch.arange(cells + 1, dtype=torch.float64) / cells)
    seen = torch.stack([result[name].double() @ mode for name in ("in", "out")])
    fade = torch.cos(pi / 2 * torch.linspace(-1, 1, steps, dtype=torch.float64).clamp(min=0)).square()
    angle = -2 * pi * model.dt * torch.arange(1, steps + 1, dtype=torch.float64)[:, None] * FREQUENCIES
    return (seen * fade).to(torch.complex128) @ torch.polar(torch.ones(()).double(), angle)


@cache
def empty(cells: int) -> Tensor:
    model, _ = simulation(cells)
    return spectra(model, 1.0, STEPS * cells)


def scattered(eps: Tensor, cells: int) -> Tensor:
    """S11 and S21 of a filling, referred to the middle: complex128 (2, frequencies)."""
    model, half = simulation(cells)
    seen, incident = spectra(model, eps, STEPS * cells), empty(cells)
    beta = (2 * pi * FREQUENCIES / C0).square().sub((pi / WIDTH) ** 2).sqrt()
    back = torch.polar(torch.ones(()).double(), 2 * beta * half)
    return torch.stack([(seen[0] - incident[0]) / incident[0] * back, seen[1] / incident[0] * back])


def solve(values: Mapping[str, float], cells: int = 48) -> Tensor:
    """S11 and S21 of the filter: complex128 (2, frequencies)."""
    model, _ = simulation(cells)
    outer = values["outer_radius"], values["outer_eps"]
    inner = values["inner_radius"], values["inner_eps"]
    discs = [(-values["spacing"], *outer), (0.0, *inner), (values["spacing"], *outer)]
    return scattered(permittivity(model.grid, discs), cells)


POSTS = Geometry("posts", SPACE, FREQUENCIES, ("S11", "S21"), solve, "phases")
