"""Synthetic surveys: a basin 10 km wide and 1 km deep, the geometry of the SAMTEX example, and truths for both.

The models of the published 10 km x 1 km example are not public; these are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tutti.science.em.mt.inverse.columns import Columns, basin, samtex
from tutti.science.em.mt.inverse.parameters import Region
from tutti.science.em.mt.mesh import Mesh2D
from tutti.science.em.shown import Brief


@dataclass(frozen=True, repr=False)
class Setting(Brief):
    """A survey over a mesh with a region of coded columns. length: correlation of sections along the profile, m."""

    mesh: Mesh2D
    region: Region
    columns: Columns
    frequencies: tuple[float, ...]
    sites: tuple[float, ...]
    length: float

    def extended(self, sections: Tensor) -> Tensor:
        """Sections of the region (..., rows, columns) continued over the mesh (..., nz, nx)."""

        def inside(n: int, part: slice) -> Tensor:
            return torch.arange(n).clamp(part.start, part.stop - 1) - part.start

        return sections[..., inside(self.mesh.nz, self.region.rows), :][..., inside(self.mesh.nx, self.region.columns)]

    def truths(self, count: int, seed: int = 0) -> Tensor:
        """Sections whose columns are those of the prior, (count, nz, nx)."""
        generator = torch.Generator().manual_seed(seed)
        x = self.mesh.x[self.region.columns]
        return self.extended(self.columns.sections(count, x, self.length, generator))


def basin_setting(sites: int = 25, frequencies: int = 16) -> Setting:
    """The basin: 50 x 31 cells of 200 m by 8 to 90 m, with margins; 1 Hz to 5 kHz."""
    margins = list(accumulate(200 * 1.5**i for i in range(1, 8)))
    x = [-m for m in reversed(margins)] + [200.0 * i for i in range(51)] + [10_000 + m for m in margins]
    z, step = [0.0], 8.0
    while z[-1] < 980:
        z.append(z[-1] + step)
        step *= 1.082
    bottom = z[-1]
    while z[-1] < 8000:
        step *= 1.35
        z.append(z[-1] + step)
    mesh = Mesh2D(x, z)
    region = Region.of(mesh, 0, 10_000, 0, bottom)
    places = torch.linspace(200, 9800, sites, dtype=torch.float64).tolist()
    return Setting(mesh, region, basin(mesh.z[region.rows]), _decades(0, 3.7, frequencies), tuple(places), 2500.0)


def samtex_setting() -> Setting:
    """The released example: 100 x 64 cells over 750 km x 84 km, 36 sites, 20 frequencies; columns 15 to 54 and rows 32
    to 63 are coded."""
    mesh = Mesh2D.geometric(750e3)
    region = Region(slice(32, 64), slice(15, 55))
    kim, eto = torch.linspace(20e3, 180e3, 10), torch.linspace(200e3, 750e3, 26)
    sites = tuple(torch.cat([kim, eto]).double().tolist())
    return Setting(mesh, region, samtex(mesh.z[region.rows]), _decades(-4, 2, 20), sites, 60e3)


SETTINGS = {"basin": basin_setting, "samtex": samtex_setting}


def _decades(low: float, high: float, count: int) -> tuple[float, ...]:
    return tuple(torch.logspace(low, high, count, dtype=torch.float64).tolist())


def outside_of_prior(setting: Setting, count: int, seed: int = 0) -> Tensor:
    """Sections of the basin that the prior does not hold: a vertical contact, two blocks, a dipping conductor, and a
    resistive layer over a conductive basement, in turns with random sizes. (count, nz, nx)."""
    generator = torch.Generator().manual_seed(seed)
    x, z = (setting.mesh.x / 1000)[None, :], setting.mesh.z[:, None]
    kinds = (_contact, _blocks, _dipping, _inverted)
    return torch.stack([
        kinds[i % 4](x, z, torch.rand(8, generator=generator, dtype=torch.float64).tolist()) for i in range(count)
    ])  # fmt: skip


def _paint(model: Tensor, where: Tensor, value: float) -> Tensor:
    return torch.where(where, torch.tensor(value, dtype=torch.float64), model)


def _uniform(x: Tensor, z: Tensor, value: float) -> Tensor:
    return torch.full((z.shape[0], x.shape[1]), value, dtype=torch.float64)


def _contact(x: Tensor, z: Tensor, u: Sequence[float]) -> Tensor:
    model = _uniform(x, z, 1.5 + u[0])
    return _paint(model, (x > 3 + 4 * u[1]) & (z > 50 + 150 * u[2]), 3 + u[3])


def _blocks(x: Tensor, z: Tensor, u: Sequence[float]) -> Tensor:
    model = _uniform(x, z, 1.5 + u[0])
    top = 200 + 200 * u[3]
    model = _paint(model, ((x - 2 - 2 * u[1]).abs() < 0.5 + u[2] / 2) & (z > top) & (z < top + 250), 0.3 + u[4] / 2)
    top = 300 + 300 * u[6]
    return _paint(model, ((x - 6 - 2 * u[5]).abs() < 0.5 + u[2] / 2) & (z > top) & (z < top + 250), 3.2)


def _dipping(x: Tensor, z: Tensor, u: Sequence[float]) -> Tensor:
    top = 100 + (60 + 40 * u[1]) * x
    return _paint(_uniform(x, z, 1.5 + u[0]), (z > top) & (z < top + 120), 0.2 + 0.8 * u[2])


def _inverted(x: Tensor, z: Tensor, u: Sequence[float]) -> Tensor:
    model = _paint(_uniform(x, z, 1.5 + u[0]), (z > 100 + 200 * u[1]) & (x > -1e9), 3.2)
    return _paint(model, (z > 500 + 300 * u[2]) & (x > -1e9), 0.5 + u[3])
