"""Layers and bodies as a mesh shows them: whole cells, those whose centres they hold."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tutti.science.em.mt.mesh import Mesh2D
from tutti.science.em.mt.tables import ModelTable

NEAR = 0.05  # of a size: a side that is this far off is told


def held(centres: Tensor, first: float, last: float) -> Tensor:
    """Which cells are between two places."""
    return (centres >= first) & (centres < last)


def snapped(model: ModelTable, mesh: Mesh2D) -> list[str]:
    """A line for each layer and body whose cells begin or end elsewhere, by more than NEAR of its size."""
    if model.file or model.draw is not None:
        return []
    told = [_told(f"layer {i}", mesh, z=(layer.top, layer.bottom)) for i, layer in enumerate(model.layers, 1)]
    told += [_told(f"body {i}", mesh, x=body.x, z=body.z) for i, body in enumerate(model.bodies, 1)]
    return [line for line in told if line]


def _told(name: str, mesh: Mesh2D, **sides: tuple[float, float]) -> str:
    found, wanted, edges = [], [], []
    for axis, (first, last) in sides.items():
        places, centres = (mesh.x_edges, mesh.x) if axis == "x" else (mesh.z_edges, mesh.z)
        got = _extent(places, held(centres, first, last))
        want = max(first, places[0]), min(last, places[-1])
        if max(abs(a - b) for a, b in zip(got, want, strict=True)) > NEAR * (want[1] - want[0]):
            found.append(f"{axis} {got[0]:.0f} to {got[1]:.0f} m")
            wanted.append(f"{want[0]:.0f} to {want[1]:.0f} m")
            edges.append(f"{axis}_edges")
    if not found:
        return ""
    return (
        f"{name}: {' and '.join(found)} on this mesh, {' and '.join(wanted)} wanted; finer cells ([mesh] width, growth)"
        f" or {' and '.join(edges)} follow it"
    )


def _extent(edges: Sequence[float], inside: Tensor) -> tuple[float, float]:
    cells = inside.nonzero().flatten().tolist()
    return edges[cells[0]], edges[cells[-1] + 1]
