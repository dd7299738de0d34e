"""Lumped ports, voltages and currents of lines, and S-parameters.

A port is a voltage source with an inner resistance over parallel edges: the conductivity length / (R area) and the
current density V / (R area). Without a waveform it is a load. Waves of a line of impedance Z are

    a = (V + Z I) / (2 sqrt Z),  b = (V - Z I) / (2 sqrt Z),  S_ij = b_i / a_j.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import pi, sqrt

import torch
from torch import Tensor

from tutti.science.em.fdtd.grid import Grid
from tutti.science.em.fdtd.monitors import Snapshots
from tutti.science.em.fdtd.problem import Setting
from tutti.science.em.fdtd.simulation import Result
from tutti.science.em.fdtd.sources import Current, Entries, Where, driven
from tutti.science.em.fdtd.waveforms import Waveform


@dataclass(frozen=True)
class Port:
    """where: nodes of the edges, a slice along the edges and across. The voltage is minus the integral of E."""

    component: str
    where: Where
    resistance: float
    waveform: Waveform | None = None
    shot: int | None = None

    def __post_init__(self) -> None:
        if not self.resistance > 0:
            raise ValueError(f"resistance of a port: positive, in ohm, not {self.resistance}")

    def size(self, grid: Grid) -> tuple[float, float]:
        """Length in m along the edges, and area in m^2 across (in two dimensions, length)."""
        length, area = 0.0, 1.0
        for axis, (x, n, delta) in enumerate(zip(self.where, grid.nodes, grid.lengths, strict=True)):
            count = len(range(n)[x]) if isinstance(x, slice) else 1
            if axis == "xyz".index(self.component[1]):
                length = count * delta
            else:
                area *= count * delta
        return length or 1.0, area

    def conductivity(self, grid: Grid) -> list[tuple[str, Tensor, float]]:
        length, area = self.size(grid)
        place, _ = driven(grid, self.component, self.where, "port")
        return [(self.component, place, length / (self.resistance * area))]

    def entries(self, setting: Setting) -> list[Entries]:
        if self.waveform is None:
            return []
        _, area = self.size(setting.grid)
        current = Current(self.component, self.where, self.waveform, 1 / (self.resistance * area), self.shot)
        return current.entries(setting)


@dataclass(frozen=True)
class LinePlane:
    """Where voltage and current of a strip over ground are read.

    along: axis of propagation; a current towards `sign` along it counts as positive, into the device. height: axis
    from ground to strip. strip: (first, last) node across. place: node along. ground, top: nodes in height.
    """

    name: str
    along: str
    height: str
    strip: tuple[int, int]
    place: int
    ground: int
    top: int
    sign: int = 1
    parts: tuple[Snapshots, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        v, w = ("xyz".index(x) for x in (self.along, self.height))
        u = 3 - v - w
        first, last = self.strip

        def at(across: int | slice, along: int | slice, height: int | slice) -> list[int | slice]:
            where: list[int | slice] = [0, 0, 0]
            where[u], where[v], where[w] = across, along, height
            return where

        across, names = slice(first, last + 1), ("H" + "xyz"[u], "H" + "xyz"[w])
        around, top = slice(self.place - 1, self.place + 1), self.top  # H lies half a cell before and behind E
        object.__setattr__(self, "parts", (
            Snapshots(f"{self.name} voltage", "E" + self.height, at(across, self.place, slice(self.ground, top))),
            Snapshots(f"{self.name} above", names[0], at(across, around, top)),
            Snapshots(f"{self.name} below", names[0], at(across, around, top - 1)),
            Snapshots(f"{self.name} left", names[1], at(first - 1, around, top)),
            Snapshots(f"{self.name} right", names[1], at(last, around, top)),
        ))  # fmt: skip

    def voltage_and_current(self, grid: Grid, result: Result) -> tuple[Tensor, Tensor]:
        """(..., steps) each: V at the end of steps, I in their middle and as the mean of both sides of the plane."""
        v, w = ("xyz".index(x) for x in (self.along, self.height))
        u = 3 - v - w
        field, above, below, left, right = (result[x.name] for x in self.parts)
        axis = -1 if u < w else -2
        voltage = -(field.sum(axis) * grid.lengths[w]).mean(-1)
        cyclic = 1 if (w, u, v) in ((0, 1, 2), (1, 2, 0), (2, 0, 1)) else -1
        strip = (above - below).sum(-2 if u < v else -1)
        current = (grid.lengths[u] * strip + grid.lengths[w] * (left - right)).mean(-1)
        return voltage, current * (self.sign * cyclic)


def waves(line: LinePlane, grid: Grid, result: Result, dt: float, frequencies: Tensor,
          impedance: float = 50.0) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(a, b): complex (..., frequencies)."""
    voltage, current = line.voltage_and_current(grid, result)
    times = torch.arange(1, voltage.shape[-1] + 1, dtype=torch.float64) * dt
    angle = -2 * pi * frequencies.double()[:, None]
    v = voltage.to(torch.complex128) @ torch.polar(torch.ones(()).double(), angle * times).T
    i = current.to(torch.complex128) @ torch.polar(torch.ones(()).double(), angle * (times - dt / 2)).T
    return (v + impedance * i) / (2 * sqrt(impedance)), (v - impedance * i) / (2 * sqrt(impedance))


def s_parameters(lines: Sequence[LinePlane], grid: Grid, result: Result, dt: float, frequencies: Tensor,
                 impedance: float = 50.0) -> Tensor:  # fmt: skip
    """S_i1 of a run that drives the first line: complex (lines, frequencies)."""
    a, _ = waves(lines[0], grid, result, dt, frequencies, impedance)
    return torch.stack([waves(x, grid, result, dt, frequencies, impedance)[1] / a for x in lines])
