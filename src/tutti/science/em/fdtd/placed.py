"""Checks of where sources and far-field surfaces lie: absorbing layers, and the box of a plane wave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tutti.science.em.fdtd.excitation.planewave import PlaneWave
from tutti.science.em.fdtd.excitation.sources import HARD, Entries
from tutti.science.em.fdtd.grid import Grid
from tutti.science.em.fdtd.media.cpml import CPML
from tutti.science.em.fdtd.observation.arrival import monitored, nodes
from tutti.science.em.fdtd.observation.monitors import Energy, Side
from tutti.science.em.fdtd.problem import PoleArrays, Setting


def check_surfaces(grid: Grid, cpml: CPML | None, monitors: Sequence[Any], sources: Sequence[Any]) -> None:
    """Raises ValueError for surfaces of far fields in absorbing layers or beyond the grid, and for those that do not
    enclose the total field of a plane wave: they need the scattered field alone, half a cell to both sides; and for
    those of two dimensions on a TE grid."""
    boxes = {tuple(tuple(ends) for ends in x.box) for x in monitors if isinstance(x, Side)}
    for box in boxes:
        if len(box) != len(grid.shape):
            raise ValueError(f"the surface of a far field has {len(box)} axes, {box}, the grid {len(grid.shape)}")
        if len(box) == 2 and "Ez" not in grid.components:
            raise ValueError(f"far fields in two dimensions need a TM grid, not one in mode {grid.mode}")
        for axis, ((first, last), n) in enumerate(zip(box, grid.shape, strict=True)):
            low, high = cpml.thickness(axis) if cpml else (0, 0)
            if not low < first < last < n - high:
                raise ValueError(f"the surface of a far field along {'xyz'[axis]}: between {low} and {n - high}, where "
                                 f"absorbing layers begin, not from {first} to {last}")  # fmt: skip
            for wave in sources:
                if not isinstance(wave, PlaneWave) or len(wave.box) != len(box):  # a run raises for the latter
                    continue
                if not first < wave.box[axis][0] < wave.box[axis][1] < last:
                    raise ValueError(f"the surface of a far field along {'xyz'[axis]}, {first} to {last}, must enclose "
                                     f"the box of the plane wave, {wave.box[axis][0]} to {wave.box[axis][1]}: only "
                                     "outside of it fields are scattered")  # fmt: skip


def check_waves(setting: Setting, sources: Sequence[tuple[Any, Sequence[Entries]]],
                poles: Sequence[PoleArrays]) -> None:  # fmt: skip
    """Raises ValueError for a face of the box of a plane wave in a dispersive medium. sources: with their entries."""
    electric = [
        (wave, x) for wave, entries in sources if isinstance(wave, PlaneWave) for x in entries if x.component < 3
    ]
    for wave, x in electric:
        at = torch.stack(torch.unravel_index(x.place, setting.grid.array), 1)
        for pole in poles:
            gain, start, stop = pole.gain[x.component], torch.tensor(pole.start), torch.tensor(pole.stop)
            inside = at[((at >= start) & (at < stop)).all(1)] - start
            if gain.numel() and bool(gain.detach().cpu()[tuple(inside.T)].any()):
                raise ValueError(f"the box of a plane wave, {wave.box}, passes through a dispersive medium")


def absorbed(setting: Setting, entries: Sequence[Entries]) -> Iterator[str]:
    """A warning for each source that lies in absorbing layers with all its nodes."""
    for x in entries:
        nodes = torch.unravel_index(x.place, setting.grid.array)
        inside = torch.zeros_like(x.place, dtype=torch.bool)
        for line, at in zip(setting.lines[0 if x.component < 3 else 1], nodes, strict=True):
            inside |= line.absorbs[at]
        if len(inside) and bool(inside.all()):
            where = [int(nodes[d][0]) for d in setting.grid.axes[: len(setting.grid.shape)]]
            yield f"a source at node {where} lies in absorbing layers, which attenuate its field: move it inside"


def conducting(setting: Setting, entries: Sequence[Entries]) -> Iterator[str]:
    """A warning for each electric current all of whose nodes are in a perfect conductor."""
    for x in entries:
        if x.component < 3 and x.kind != HARD and len(x.place) and not bool(setting.gain(x.component, x.place).any()):
            at = torch.unravel_index(x.place, setting.grid.array)
            where = [int(at[d][0]) for d in setting.grid.axes[: len(setting.grid.shape)]]
            yield f"a source at node {where} lies in a perfect conductor, where E stays zero: move it out"


def hidden(setting: Setting, monitors: Sequence[Any]) -> Iterator[str]:
    """A warning for each monitor that lies in absorbing layers with all its nodes."""
    grid = setting.grid
    for x in monitors:
        if isinstance(x, Energy):
            continue
        at, inside = nodes(grid, monitored(grid, x)), None
        for axis, d in enumerate(grid.axes[: len(grid.shape)]):
            layer = setting.lines[0 if x.component[0] == "E" else 1][d].absorbs[at[:, axis]]
            inside = layer if inside is None else inside | layer
        if inside is not None and bool(inside.all()):
            where = at[0].tolist()
            yield f"monitor {x.name}, at node {where}, lies in absorbing layers, which attenuate: move it inside"
