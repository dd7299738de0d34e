"""Plane waves along an axis by total and scattered fields (A. Taflove and S. Hagness, Computational Electrodynamics,
3rd ed., section 5.6).

Inside of a box all fields are total, outside only scattered. Where a difference takes one of each, the incident field
makes up for it. It comes from a grid of one dimension with the same cells and time step, so that nothing leaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tutti.science.em.fdtd.excitation.sources import MAGNETIC, SOFT, Entries, sampled
from tutti.science.em.fdtd.excitation.waveforms import Waveform, check_waveform
from tutti.science.em.fdtd.grid import C0, EPS0, MU0, Grid
from tutti.science.em.fdtd.problem import Setting, direction, source

if TYPE_CHECKING:
    from tutti.science.em.fdtd.simulation import Result

AHEAD = 2  # cells between the start of the wave and the box


@dataclass(frozen=True)
class PlaneWave:
    """A wave in vacuum. box: (first, last) node by axis; -1 or beyond the last node for an end that it leaves open, on
    the axis of the polarization only. What scatters lies inside: faces of the box lie in vacuum, outside of absorbing
    layers, media and conductors; simulations raise ValueError for others.

    along: direction of propagation, "+x", "-x", ... polarization: component of E, "Ez", ..., across it (in TE "Ex" or
    "Ey", then Hz follows).
    waveform: E in V/m, at AHEAD cells before the box.
    """

    box: Sequence[tuple[int, int]]
    along: str
    polarization: str
    waveform: Waveform

    def __post_init__(self) -> None:
        check_waveform(self.waveform, "plane wave")
        ways, fields = [x + y for x in "+-" for y in "xyz"], ["Ex", "Ey", "Ez"]
        if self.along not in ways or self.polarization not in fields or self.along[1] == self.polarization[1]:
            raise ValueError(f"a plane wave along {self.along!r} cannot have {self.polarization!r}: along is one of "
                             f"{', '.join(ways)}, and the polarization {', '.join(fields)} across")  # fmt: skip
        if not isinstance(self.box, Sequence) or not all(
            isinstance(ends, Sequence) and len(ends) == 2 and all(hasattr(n, "__index__") for n in ends)
            for ends in self.box
        ):
            raise ValueError(f"box: (first, last) node for each axis, not {self.box}")

    def incident(self, setting: Setting, count: int) -> tuple[Tensor, Tensor]:
        """E before each step (steps, count) and H / sign after its half, by distance in cells from the start.

        The wave is at rest at t = 0, also where the steps begin later.
        """
        grid, steps = setting.grid, setting.start + setting.steps
        delta = grid.lengths["xyz".index(self.along[1])]
        n = count + ceil(steps * C0 * setting.dt / delta / 2) + 4
        e, h = np.zeros(n + 1), np.zeros(n)
        times = replace(setting, start=0, steps=steps).times(1.0)
        at = sampled(self.waveform, times, "plane wave")[:, 0].numpy()
        es, hs = np.zeros((setting.steps, count)), np.zeros((setting.steps, count))
        for step in range(steps):
            row = step - setting.start
            if row >= 0:
                es[row] = e[:count]
            h -= setting.dt / (MU0 * delta) * (e[1:] - e[:-1])
            if row >= 0:
                hs[row] = h[:count]
            e[1:-1] -= setting.dt / (EPS0 * delta) * (h[1:] - h[:-1])
            e[0] = at[step]
        return torch.from_numpy(es), torch.from_numpy(hs)

    def spectrum(self, result: Result, frequencies: Tensor, node: int) -> Tensor:
        """The Fourier sums of incident E at a node of the wave's axis in the box, complex128 (frequencies), in V s/m.

        As a `Spectrum` would see it in an empty grid over the steps of a run from rest. frequencies: Hz.
        """
        dt, steps = result.dt, result.steps
        setting = Setting(result.grid, dt, steps + 1, (), lambda _, place: place.double())
        first, last = self.box["xyz".index(self.along[1])]
        if not first <= node <= last:
            raise ValueError(f"node: in the box of the wave, from {first} to {last} along {self.along[1]}, not {node}")
        column = AHEAD + (node - first if self.along[0] == "+" else last - node)
        e, _ = self.incident(setting, last - first + 2 * AHEAD + 2)
        times = torch.arange(1, steps + 1, dtype=torch.float64) * dt
        phase = torch.exp(-2j * torch.pi * torch.as_tensor(frequencies, dtype=torch.float64)[:, None] * times)
        return (phase * e[1:, column]).sum(1) * dt

    def entries(self, setting: Setting) -> list[Entries]:
        grid = setting.grid
        u, v = "xyz".index(self.along[1]), "xyz".index(self.polarization[1])
        if u >= len(grid.shape):
            raise ValueError(f"a plane wave along {self.along} is beyond the {len(grid.shape)} axes of the grid")
        if len(self.box) != len(grid.shape):
            raise ValueError(f"box: (first, last) for each of {len(grid.shape)} axes, not {self.box}")
        for axis, (ends, n) in enumerate(zip(self.box, grid.shape, strict=True)):
            least, most = (0, n) if axis == v else (1, n - 1)
            first, last = (max(ends[0], 0), min(ends[1], n)) if axis == v else ends
            if not least <= first < last <= most:
                raise ValueError(f"box along {'xyz'[axis]}: nodes from {least} to {most}, first below last, not "
                                 f"{ends[0]} to {ends[1]}")  # fmt: skip
        forward = self.along[0] == "+"
        third = 3 - u - v
        sign = (1 if (u, v, third) in ((0, 1, 2), (1, 2, 0), (2, 0, 1)) else -1) * (1 if forward else -1)
        e_name, h_name = self.polarization, "H" + "xyz"[third]
        e, h = grid.component(e_name), grid.component(h_name)
        first, last = self.box[u]
        count = last - first + 2 * AHEAD + 2
        es, hs = self.incident(setting, count)
        total = [self.inside(grid, i) if grid_has(grid, i) else None for i in range(6)]
        out = []
        for target in range(6):
            if total[target] is None:
                continue
            side, p = divmod(target, 3)
            for t in (0, 1):
                other = 3 * (1 - side) + source(side, p, t)
                if other != (e if side else h):
                    continue
                d = direction(side, p, t)
                out += self.corrections(setting, total[target], total[other], target, d, -1 if t else 1, u, forward,
                                        (es if side else hs) * (1 if side else sign * grid.h_sign))  # fmt: skip
        return out

    def corrections(self, setting: Setting, mine: Tensor | None, theirs: Tensor | None, target: int, d: int,
                    sign: int, u: int, forward: bool, waves: Tensor) -> list[Entries]:  # fmt: skip
        """The difference of the incident field along axis d, for the update kernels. Raises ValueError outside of
        vacuum."""
        assert mine is not None and theirs is not None
        grid, electric, out = setting.grid, target < 3, []
        line = setting.lines[0 if electric else 1][d]
        # x1 - x0: for E the neighbours are at n and n - 1, for H at n + 1 and n
        for x1 in (True, False):
            by = (0 if x1 else -1) if electric else (1 if x1 else 0)
            shifted = torch.roll(theirs, -by, d)
            lost = mine.to(torch.int8) - shifted.to(torch.int8)
            edge = lost.narrow(d, 0 if by < 0 else mine.shape[d] - 1, 1)
            if by:
                edge.zero_()
            where = lost.nonzero()
            if not len(where):
                continue
            amount = lost[tuple(where.T)].double() * (1 if x1 else -1) * sign * line.w[where[:, d]]
            node = where[:, grid.axes[u]] + (by if d == grid.axes[u] else 0)
            first, last = self.box[u]
            # E is at nodes, H half a cell further
            column = node - first + AHEAD if forward else last + AHEAD - node - (1 if electric else 0)
            n = grid.array
            place = (where[:, 0] * n[1] + where[:, 1]) * n[2] + where[:, 2]
            gain, vacuum = setting.gain(target, place), setting.dt / (EPS0 if electric else MU0)
            if bool(line.absorbs[where[:, d]].any()):
                raise ValueError(f"the box of a plane wave, {self.box}, reaches into absorbing layers")
            if bool((gain == 0).any()):
                raise ValueError(f"the box of a plane wave, {self.box}, passes through a conductor")
            if bool(((gain / vacuum - 1).abs() > 1e-5).any()):
                raise ValueError(f"the box of a plane wave, {self.box}, passes through a medium")
            if not electric:
                amount = amount * gain
            kind = SOFT if electric else MAGNETIC
            out.append(Entries(kind, target, place, amount, column, waves, None))
        return out

    def inside(self, grid: Grid, component: int) -> Tensor:
        """Where a component is in the box, in the array of the kernels."""
        side, p = divmod(component, 3)
        out = torch.ones(grid.array, dtype=torch.bool)
        for axis, (first, last) in enumerate(self.box):
            d = grid.axes[axis]
            place = torch.arange(grid.array[d], dtype=torch.float64) + (0.5 if (d == p) == (side == 0) else 0.0)
            shape = [1, 1, 1]
            shape[d] = -1
            out &= ((place >= first) & (place <= last)).reshape(shape)
        return out


def grid_has(grid: Grid, component: int) -> bool:
    return component in [grid.component(name) for name in grid.components]
