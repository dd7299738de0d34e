"""A preview of voxels: which solid fills the cells of three planes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tutti.science.em.bounds import check_kind
from tutti.science.em.cad.voxels import Voxels

__all__ = ["picture"]

COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
NAMES = "xyz"
COLUMNS = 4  # of the legend


def picture(voxels: Voxels, path: str | Path, at: tuple[float, float, float] | None = None) -> None:
    """Draw the planes through a point in metres, by default the middle. path: a PNG, PDF or SVG, whose axes are in mm.

    Raises ValueError for a point outside of the grid.
    """
    check_kind("voxels", voxels, Voxels)
    edges = (voxels.x, voxels.y, voxels.z)
    if at is not None and not (len(at) == 3 and all(e[0] <= x <= e[-1] for e, x in zip(edges, at, strict=True))):
        grid = ", ".join(f"{name} from {e[0]:g} to {e[-1]:g}" for name, e in zip(NAMES, edges, strict=True))
        raise ValueError(f"at: a point of the grid in metres, {grid}, not {at}")
    point = at or tuple(float(e[0] + e[-1]) / 2 for e in edges)
    rows = -(-len(voxels.fractions) // COLUMNS)
    figure = Figure((12, 4.2 + 0.3 * rows), layout="constrained")
    colors = {name: np.array(to_rgb(COLORS[i % len(COLORS)])) for i, name in enumerate(voxels.fractions)}
    for axes, (across, up, cut) in zip(figure.subplots(1, 3), ((0, 1, 2), (0, 2, 1), (1, 2, 0)), strict=True):
        k = int(np.clip(np.searchsorted(edges[cut], point[cut], side="right") - 1, 0, len(edges[cut]) - 2))
        image = np.ones((len(edges[up]) - 1, len(edges[across]) - 1, 3))
        for name, fraction in voxels.fractions.items():
            filled = fraction.select(cut, k).numpy().T[..., None]
            image += filled * (colors[name] - 1)
        axes.pcolormesh(edges[across] * 1e3, edges[up] * 1e3, image.clip(0, 1))
        axes.set(xlabel=f"{NAMES[across]} (mm)", ylabel=f"{NAMES[up]} (mm)", aspect="equal",
                 title=f"{NAMES[cut]} = {1e3 * point[cut]:.3g} mm")  # fmt: skip
    materials = voxels.materials
    handles = [
        Patch(color=tuple(color), label=f"{name}: eps_r {materials[name].eps_r:g}, {materials[name].sigma:g} S/m")
        for name, color in colors.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=COLUMNS)
    figure.savefig(path)
