"""Layers and bodies as a mesh shows them: whole cells, those whose centres they hold."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tutti.science.em.mt.mesh import Mesh2D
from tutti.science.em.mt.tables import ModelTable

NEAR = 0.01  # of the cell it lies in: a side that is further off is warned of


def cells_within(centres: Tensor, first: float, last: float) -> Tensor:
    """Which cells are between two places."""
    return (centres >= first) & (centres < last)


def interfaces(model: ModelTable) -> tuple[list[float], list[float]]:
    """Depths and places along the profile where layers and bodies begin and end."""
    if model.file or model.draw is not None:
        return [], []
    depths = [z for layer in model.layers for z in (layer.top, layer.bottom)]
    return depths + [z for body in model.bodies for z in body.z], [x for body in model.bodies for x in body.x]


def snapped(model: ModelTable, mesh: Mesh2D) -> list[str]:
    """A line for each side of a layer or body that lies elsewhere on a mesh, by more than NEAR of a cell."""
    if model.file or model.draw is not None:
        return []
    lines: list[str] = []
    for i, layer in enumerate(model.layers, 1):
        lines += _moved(f"layer {i}", "z_edges", mesh.z_edges, mesh.z, layer.top, layer.bottom, ("top", "bottom"))
    for i, body in enumerate(model.bodies, 1):
        lines += _moved(f"body {i}", "x_edges", mesh.x_edges, mesh.x, *body.x, ("left side", "right side"))
        lines += _moved(f"body {i}", "z_edges", mesh.z_edges, mesh.z, *body.z, ("top", "bottom"))
    return lines


def _moved(name: str, key: str, edges: Sequence[float], centres: Tensor, first: float, last: float,
           sides: tuple[str, str]) -> list[str]:  # fmt: skip
    cells = cells_within(centres, first, last).nonzero().flatten().tolist()
    lines = []
    for side, wanted, cell, edge in zip(sides, (first, last), (cells[0], cells[-1]), (cells[0], cells[-1] + 1),
                                        strict=True):  # fmt: skip
        wanted, place = min(max(wanted, edges[0]), edges[-1]), edges[edge]
        if abs(place - wanted) > NEAR * (edges[cell + 1] - edges[cell]):
            lines.append(
                f"{name}: its {side} is at {place:.6g} m on this mesh, {wanted:.6g} m wanted; an edge of cells there"
                f" (mesh.{key}) would meet it"
            )
    return lines
