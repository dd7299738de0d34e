"""Whether a mesh suits a model: rows thin enough for the skin depth, columns no wider than sites are apart, sides and
bottom far enough away.

With the skin depth d of a cell, c the skin depths above it and z the depth of its top, a row of thickness h is too
thick where h e^-c / (z + d) > THICK: fields fall by e^-c, and what is below z + d hardly matters. Measured
on 125 meshes of 5 layered earths at 10 mHz to 1 kHz against the exact response: below 0.4 the errors of apparent
resistivity have a median of 0.7 % and are at most 23 %; above, the median is 17 %, and beyond 1 it is 100 %.

Sides and bottom continue the model in one dimension. At 0.5 skin depths from the sites rather than far away they change
apparent resistivity by 2 to 24 % over blocks and up to 58 % over a contact; at 1.5, the rule of `Mesh2D.for_survey`, by
0 to 6 % and up to 24 %.

Columns under sites may be as wide as the median distance of sites. Over a body 1 km wide, 200 to 700 m deep, of 10 in
100 ohm-m, with sites every 400 m, apparent resistivities of TM at 1 Hz to 1 kHz differ from those of columns of 25 m by
up to 3 % with 100 m (a quarter, the rule of `Mesh2D.for_survey`), 35 % with 250 m, 69 % with 500 m, and a factor of 7
to 10 with 1000 m. Widths in skin depths do not tell good columns from bad ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor

from tutti.science.em.mt.mesh import Mesh2D, skin_depth

THICK, NEAR = 0.4, 0.5  # skin depths
ADVICE = "Mesh2D.for_survey(frequencies, sites, rho_range) makes a mesh that suits"


def shortcomings(mesh: Mesh2D, log_rho: Tensor, frequencies: Sequence[float], sites: Sequence[float]) -> list[str]:
    """Why responses of a model (nz, nx) may be wrong, with numbers; empty if the mesh suits it."""
    edges = torch.tensor(mesh.x_edges, dtype=torch.float64)
    first, last = (int((edges[1:-1] < x).sum()) for x in (min(sites), max(sites)))
    under = log_rho.detach().double().cpu()[:, first : last + 1]
    messages = [_thick(mesh, under, frequencies, first)]
    if (log_rho != log_rho[:, :1]).any():  # a layered earth continues as it is
        messages.append(_wide(mesh, sites))
        messages += _near(mesh, under, min(frequencies), min(sites) - mesh.x_edges[0], mesh.x_edges[-1] - max(sites))
    return [each for each in messages if each]


def _depths(mesh: Mesh2D, log_rho: Tensor, frequency: float) -> tuple[Tensor, Tensor]:
    """The thickness of each cell, and of all cells above it, in skin depths."""
    thickness = mesh.dz[:, None] / (skin_depth(1.0, frequency) * 10 ** (log_rho / 2))
    return thickness, thickness.cumsum(0) - thickness


def _thick(mesh: Mesh2D, log_rho: Tensor, frequencies: Sequence[float], first: int) -> str:
    worst, row, column, at = 0.0, 0, 0, 0.0
    top = torch.tensor(mesh.z_edges[:-1], dtype=torch.float64)[:, None]
    for frequency in frequencies:
        thickness, above = _depths(mesh, log_rho, frequency)
        each = mesh.dz[:, None] * (-above).exp() / (top + mesh.dz[:, None] / thickness)
        if float(each.max()) > worst:
            worst, at = float(each.max()), frequency
            row, column = divmod(int(each.argmax()), each.shape[1])
    if worst <= THICK:
        return ""
    rho = 10 ** float(log_rho[row, column])
    return (
        f"the row of cells from {_metres(mesh.z_edges[row])} to {_metres(mesh.z_edges[row + 1])} m is too thick for"
        f" {at:.4g} Hz: the skin depth in the {rho:.3g} ohm-m at x = {_metres(float(mesh.x[first + column]))} m is"
        f" {_metres(skin_depth(rho, at))} m, and a first row may be {THICK} of it"
    )


def _wide(mesh: Mesh2D, sites: Sequence[float]) -> str:
    places = sorted(set(sites))
    if len(places) < 2:
        return ""
    spacing = median(b - a for a, b in pairwise(places))
    edges = torch.tensor(mesh.x_edges[1:-1], dtype=torch.float64)
    x = torch.tensor(places, dtype=torch.float64)
    under = torch.cat([torch.searchsorted(edges, x), torch.searchsorted(edges, x, right=True)])  # on an edge: both
    column = int(under[mesh.dx[under].argmax()])
    if (width := float(mesh.dx[column])) <= spacing * (1 + 1e-6):
        return ""
    return (
        f"the column of cells from x = {_metres(mesh.x_edges[column])} to {_metres(mesh.x_edges[column + 1])} m is"
        f" {_metres(width)} m wide and holds a site: columns there may be as wide as sites are apart,"
        f" {_metres(spacing)} m, and better a quarter of that"
    )


def _near(mesh: Mesh2D, log_rho: Tensor, frequency: float, left: float, right: float) -> list[str]:
    thickness, above = _depths(mesh, log_rho, frequency)
    weight = thickness * (-2 * above).exp()  # as fields see them
    rho = 10 ** float((log_rho * weight).sum() / weight.sum())
    skin, bottom = skin_depth(rho, frequency), mesh.z_edges[-1]
    need = f"{NEAR} skin depths are needed, {_metres(NEAR * skin)} m at {frequency:.4g} Hz"
    messages = []
    if min(left, right) < NEAR * skin:
        side = "left" if left < right else "right"
        messages.append(f"the {side} side of the mesh is {_metres(min(left, right))} m from the sites: {need}")
    if bottom < NEAR * skin:
        messages.append(f"the mesh ends at {_metres(bottom)} m: {need}")
    return messages


def _metres(x: float) -> str:
    return f"{x:.3g}" if abs(x) < 100 else f"{x:.0f}"
