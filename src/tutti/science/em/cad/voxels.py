"""Solids as voxels: the fraction of each cell that a solid fills, and material tensors.

Along z the fraction is exact for each ray; across, `samples` x `samples` rays of a cell are averaged. The error of a
volume is O(h) and unbiased: faces in the planes of cells are exact, others are met by rays at regular places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from warnings import warn

import numpy as np
import torch
from torch import Tensor

from tutti.science.em.bounds import check_kind
from tutti.science.em.cad.materials import Material, material
from tutti.science.em.cad.rays import Crossings
from tutti.science.em.cad.solids import Solid
from tutti.science.em.shown import brief

HINT = "are its lengths in metres? read(path, unit=1e-3) takes millimetres, solid.scaled(1e-3) converts them"
LARGE = 10  # times the grid
Edges = Sequence[float] | np.ndarray | Tensor


def _edges(name: str, edges: Edges) -> np.ndarray:
    coordinates = np.asarray(edges, float)
    if (
        coordinates.ndim != 1
        or len(coordinates) < 2
        or not np.isfinite(coordinates).all()
        or not (np.diff(coordinates) > 0).all()
    ):
        raise ValueError(f"{name} must be 2 or more finite edges of cells that increase, in metres")
    return coordinates


def _rays(edges: np.ndarray, samples: int) -> np.ndarray:
    return (edges[:-1, None] + np.diff(edges)[:, None] * (np.arange(samples) + 0.5) / samples).ravel()


def _span(low: np.ndarray, high: np.ndarray) -> str:
    return " x ".join(f"{a:.4g} to {b:.4g}" for a, b in zip(low, high, strict=True)) + " m"


def _check_place(name: str, solid: Solid, hits: Crossings, edges: Sequence[np.ndarray]) -> None:
    """Warns of a solid beside the grid, or between its rays."""
    low, high = solid.bounds()
    first, last = np.array([(x[0], x[-1]) for x in edges]).T
    place = f"{name}, {_span(low, high)},"
    if (high <= first).any() or (low >= last).any():
        warn(f"{place} lies outside of the grid, {_span(first, last)}: {HINT}", stacklevel=3)
    elif not len(hits.ray):
        warn(f"{place} fills no cell of the grid, {_span(first, last)}: it is too thin for the rays (use smaller cells "
             "or more samples), or only its bounding box reaches into the grid", stacklevel=3)  # fmt: skip


def _check_filled(name: str, solid: Solid, fraction: Tensor, edges: Sequence[np.ndarray]) -> None:
    """Warns of a solid that fills all of a grid which is much smaller."""
    low, high = solid.bounds()
    first, last = np.array([(x[0], x[-1]) for x in edges]).T
    if (high - low > LARGE * (last - first)).all() and bool((fraction > 1 - 1e-6).all()):
        warn(f"{name}, {_span(low, high)}, fills every cell of the grid, {_span(first, last)}: {HINT}", stacklevel=3)


def _accumulate(hits: Crossings, shape: tuple[int, int, int], samples: int, z: np.ndarray) -> Tensor:
    """Fractions (nx, ny, nz) from the crossings of all rays."""
    nx, ny, nz = shape
    i, j = hits.ray // (ny * samples), hits.ray % (ny * samples)
    column = (i // samples) * ny + j // samples
    k = np.clip(np.searchsorted(z, hits.z, side="right") - 1, 0, nz - 1)
    above = np.clip((z[k + 1] - hits.z) / (z[k + 1] - z[k]), 0, 1)  # of the cell; cells above are passed whole
    change = hits.change / samples**2
    at = column * (nz + 1) + k
    steps = np.bincount(np.concatenate([at, at + 1]), np.concatenate([change * above, change * (1 - above)]),
                        minlength=nx * ny * (nz + 1))  # fmt: skip
    filled = torch.from_numpy(steps.astype(np.float32)).view(nx, ny, nz + 1).cumsum(2)[..., :nz]
    return filled.clamp_(0, 1)


def fill(solid: Solid, x: Edges, y: Edges, z: Edges, *, samples: int = 2) -> Tensor:
    """The fraction of each cell inside a solid: float32 (nx, ny, nz) in 0 to 1. x, y, z: edges of cells, metres.

    Warns of a solid that fills no cell, or all of a much smaller grid.
    """
    check_kind("solid", solid, Solid)
    if samples < 1:
        raise ValueError(f"samples are rays of a cell along x and y, 1 or more; got {samples}")
    x, y, z = (_edges(name, edges) for name, edges in zip("xyz", (x, y, z), strict=True))
    hits = solid.crossings(_rays(x, samples), _rays(y, samples))
    _check_place("the solid", solid, hits, (x, y, z))
    fraction = _accumulate(hits, (len(x) - 1, len(y) - 1, len(z) - 1), samples, z)
    _check_filled("the solid", solid, fraction, (x, y, z))
    return fraction


@dataclass(frozen=True, repr=False)
class Voxels:
    """Cells with materials. fractions: share of each cell that a solid fills, float32 (nx, ny, nz), by the name of the
    solid. materials: material of each solid, by the same names.

    x, y, z: edges of cells, metres.
    """

    x: np.ndarray
    y: np.ndarray
    z: np.ndarray
    fractions: Mapping[str, Tensor]
    materials: Mapping[str, Material]
    background: Material

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.x) - 1, len(self.y) - 1, len(self.z) - 1

    def __repr__(self) -> str:
        ends = np.array([(e[0], e[-1]) for e in (self.x, self.y, self.z)]).T
        solids = ", ".join(f"{name}: eps_r {m.eps_r:g}, {m.sigma:g} S/m" for name, m in self.materials.items())
        return f"Voxels({' x '.join(map(str, self.shape))} cells, {_span(*ends)}; {solids or 'no solids'})"

    def _mean(self, of: Mapping[str, float], background: float) -> Tensor:
        total = torch.full(self.shape, background)
        for name, fraction in self.fractions.items():
            total += fraction * (of[name] - background)
        return total

    def eps_r(self) -> Tensor:
        """Relative permittivity: the volume average of each cell."""
        return self._mean({n: m.eps_r for n, m in self.materials.items()}, self.background.eps_r)

    def mu_r(self) -> Tensor:
        """Relative permeability: the volume average of each cell."""
        return self._mean({n: m.mu_r for n, m in self.materials.items()}, self.background.mu_r)

    def sigma(self, frequency: float = 0.0) -> Tensor:
        """Conductivity in S/m, with dielectric losses at a frequency in Hz: the volume average of each cell."""
        of = {n: m.conductivity(frequency) for n, m in self.materials.items()}
        return self._mean(of, self.background.conductivity(frequency))

    def metal(self, least: float = 0.5, sigma: float = 1e5) -> Tensor:
        """Cells that conductors above `sigma` S/m fill to at least a fraction, to be taken as perfect conductors."""
        filled = torch.zeros(self.shape)
        for name, fraction in self.fractions.items():
            if self.materials[name].sigma >= sigma:
                filled += fraction
        return filled >= least

    def volume(self, name: str) -> float:
        """The volume of a solid in the grid, in cubic metres. Raises ValueError for an unknown name."""
        if name not in self.fractions:
            raise ValueError(f"no solid {name!r}; there are {', '.join(self.fractions) or 'none'}")
        cells = np.diff(self.x)[:, None, None] * np.diff(self.y)[:, None] * np.diff(self.z)
        return float((self.fractions[name].double() * torch.from_numpy(cells)).sum())


def _with_materials(solids: Any) -> dict[str, tuple[Solid, Material]]:
    if not isinstance(solids, Mapping):
        raise ValueError(f"solids: name -> (solid, material), not {brief(solids)}")
    out = {}
    for name, entry in solids.items():
        pair = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, None)
        if not isinstance(pair[0], Solid) or not isinstance(pair[1], Material | str):
            raise ValueError(f"{name}: a solid and its material, such as (solid, 'copper'), not {brief(entry)}; of a "
                             "file: {name: (solid, 'copper') for name, solid in read(path).items()}")  # fmt: skip
        out[name] = (pair[0], material(pair[1]) if isinstance(pair[1], str) else pair[1])
    return out


def voxelize(solids: Mapping[str, tuple[Solid, Material | str]], x: Edges, y: Edges, z: Edges, *, samples: int = 2,
             background: Material | str = "vacuum") -> Voxels:  # fmt: skip
    """Voxels of named solids and their materials. Where solids overlap, the later one counts.

    solids: name -> (solid, material or its name in `MATERIALS`). x, y, z: edges of cells in metres.
    Raises ValueError for other values and for unknown materials; warns of solids that fill no cell, or all of a much
    smaller grid.
    """
    x, y, z = (_edges(name, edges) for name, edges in zip("xyz", (x, y, z), strict=True))
    if samples < 1:
        raise ValueError(f"samples are rays of a cell along x and y, 1 or more; got {samples}")
    rays, shape = (_rays(x, samples), _rays(y, samples)), (len(x) - 1, len(y) - 1, len(z) - 1)
    named = _with_materials(solids)
    hits = {name: solid.crossings(*rays) for name, (solid, _) in named.items()}
    for name, (solid, _) in named.items():
        _check_place(name, solid, hits[name], (x, y, z))
    fractions, names = {}, list(named)
    for i, name in enumerate(names):
        own, bounds = hits[name], named[name][0].bounds()
        for later in names[i + 1 :]:
            other = named[later][0].bounds()
            if (bounds[0] < other[1]).all() and (other[0] < bounds[1]).all():
                own = own.combined(hits[later], lambda a, b: a & ~b)
        fractions[name] = _accumulate(own, shape, samples, z)
        _check_filled(name, named[name][0], fractions[name], (x, y, z))
    return Voxels(x, y, z, fractions, {n: m for n, (_, m) in named.items()},
                  material(background) if isinstance(background, str) else background)  # fmt: skip
