"""Curved surfaces in grids of cubes: materials at components from fractions of parts of cells.

Dielectrics: across an interface with normal n, tangential E and normal D are continuous, so that

    1 / eps_p = n_p^2 <1 / eps> + (1 - n_p^2) / <eps>,

with means over a cell around the component (A. Farjadpour et al., Opt. Lett. 31, 2972, 2006; the diagonal of their
tensor alone, with errors still of first order but small).

Conductors (S. Dey and R. Mittra, IEEE Microw. Guided Wave Lett. 7, 273, 1997): in Faraday's law the integral of E takes
the length l outside of the conductor of each edge, and that of H the area A of each face. With E l / delta in place of
E this is the usual scheme with eps delta / l and mu A / delta^2.

fractions: (parts nx, parts ny, parts nz) from `tutti.science.em.cad.fill`, an even number of parts of a cell by axis.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tutti.science.em.bounds import check_positive
from tutti.science.em.fdtd.grid import Grid


def parts_of(grid: Grid, fractions: Tensor) -> int:
    """Parts of a cell by axis. Raises ValueError unless they are even and alike."""
    parts = fractions.shape[0] // grid.shape[0]
    if grid.flat or parts < 2 or parts % 2 or tuple(fractions.shape) != tuple(parts * n for n in grid.shape):
        raise ValueError(f"fractions of shape {tuple(fractions.shape)} are not those of an even number of parts of "
                         f"{grid.shape} cells by axis")  # fmt: skip
    return parts


def mean(x: Tensor, parts: int, offset: Sequence[float], width: Sequence[int]) -> Tensor:
    """Over windows of `width` parts around each node plus `offset` cells, by axis: (nx + 1, ny + 1, nz + 1)."""
    for axis in range(3):
        cells = x.shape[axis] // parts
        start = round(offset[axis] * parts) - width[axis] // 2
        at = torch.arange(cells + 1)[:, None] * parts + start + torch.arange(width[axis])
        at = at.clamp(0, x.shape[axis] - 1)
        total = x.index_select(axis, at[:, 0])
        for column in range(1, width[axis]):
            total = total + x.index_select(axis, at[:, column])
        x = total / width[axis]
    return x


def block(fractions: Tensor, parts: int) -> tuple[slice, ...]:
    """The cells that contain all fractions that differ from the first, and one more around them where there is one."""
    different, out = fractions != fractions[0, 0, 0], []
    for axis in range(3):
        where = different.movedim(axis, 0).flatten(1).any(1).nonzero().flatten()
        first, last = (int(where[0]), int(where[-1])) if len(where) else (0, 0)
        out.append(slice(max(first // parts - 1, 0), min(last // parts + 2, fractions.shape[axis] // parts)))
    return tuple(out)


def everywhere(grid: Grid, x: Tensor, cells: Sequence[slice]) -> Tensor:
    """The values of a block of cells over all nodes; beyond the block, the value of its first node."""
    out = x[0, 0, 0].expand(grid.nodes).clone()
    out[tuple(slice(c.start, c.stop + 1) for c in cells)] = x
    return out


def offsets(name: str) -> list[float]:
    """The offsets of a component from its node, in cells."""
    return [0.5 if (axis == "xyz".index(name[1])) == (name[0] == "E") else 0.0 for axis in range(3)]


def permittivity(grid: Grid, fractions: Tensor, inside: float, outside: float = 1.0) -> dict[str, Tensor]:
    """eps_r by component over nodes, float64, of a solid with the relative permittivity `inside` in one of `outside`.

    For `Simulation.run(eps_r=...)`. Raises ValueError for fractions that do not fit the grid.
    """
    check_positive("the solid", inside=inside, outside=outside)
    parts, out = parts_of(grid, fractions), {}
    cells = block(fractions, parts)
    x = fractions[tuple(slice(c.start * parts, c.stop * parts) for c in cells)].double()
    for name in ("Ex", "Ey", "Ez"):
        place, whole = offsets(name), [parts] * 3
        share = mean(x, parts, place, whole)
        slopes = []
        for axis in range(3):
            before, after = ([p + (by if a == axis else 0) for a, p in enumerate(place)] for by in (-0.5, 0.5))
            slopes.append((mean(x, parts, after, whole) - mean(x, parts, before, whole)) / grid.lengths[axis])
        square = torch.stack(slopes).square()
        normal = square["xyz".index(name[1])] / square.sum(0).clamp(min=1e-300)
        arithmetic = outside + (inside - outside) * share
        inverse = 1 / outside + (1 / inside - 1 / outside) * share
        out[name] = everywhere(grid, 1 / (normal * inverse + (1 - normal) / arithmetic), cells)
    return out


def conductor(grid: Grid, fractions: Tensor, least: float = 0.25) -> dict[str, dict[str, Tensor]]:
    """eps_r, mu_r and pec of a perfect conductor in vacuum, for `Simulation.run(steps=..., **conductor(...))`.

    least: faces with a smaller share outside count as this share, which keeps time steps up to its square root of the
    Courant limit stable.
    """
    if not 0 < least <= 1:
        raise ValueError(f"least: a share of a face, above 0 and at most 1, not {least}")
    parts = parts_of(grid, fractions)
    cells = block(fractions, parts)
    x = 1 - fractions[tuple(slice(c.start * parts, c.stop * parts) for c in cells)].double()
    factors: dict[str, dict[str, Tensor]] = {"eps_r": {}, "mu_r": {}, "pec": {}}
    for name in ("Ex", "Ey", "Ez"):
        own = "xyz".index(name[1])
        length = mean(x, parts, offsets(name), [parts if axis == own else 2 for axis in range(3)])
        factors["eps_r"][name] = everywhere(grid, 1 / length.clamp(min=1e-3), cells)
        factors["pec"][name] = everywhere(grid, length < 1e-3, cells)
        face = "H" + name[1]
        area = mean(x, parts, offsets(face), [2 if axis == own else parts for axis in range(3)])
        factors["mu_r"][face] = everywhere(grid, area.clamp(min=least), cells)
    return factors
