"""Lumped ports, voltages and currents of lines, and S-parameters.

A port is a voltage source with an inner resistance over parallel edges: the conductivity length / (R area) and the
current density V / (R area). Without a waveform it is a load. Waves of a line of impedance Z are

    a = (V + Z I) / (2 sqrt Z),  b = (V - Z I) / (2 sqrt Z),  S_ij = b_i / a_j.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, pi, sqrt
from typing import Any
from warnings import warn

import torch
from torch import Tensor

from tutti.science.em.fdtd.excitation.sources import Current, Entries, Where, driven
from tutti.science.em.fdtd.excitation.waveforms import Waveform, check_waveform
from tutti.science.em.fdtd.grid import Grid
from tutti.science.em.fdtd.observation.monitors import Snapshots
from tutti.science.em.fdtd.problem import Setting
from tutti.science.em.fdtd.simulation import Result
from tutti.science.em.shown import brief

DECAYED = 0.01  # of the peak, at the end
WEAKEST = 1e-4  # of the peak of a spectrum that is divided by


@dataclass(frozen=True)
class Port:
    """A voltage source of `waveform` in volts behind a resistance in ohm, or a load without one.

    component: component of E along the edges. where: nodes of the edges, a slice along the edges and across. The
    voltage is minus the integral of E. shot: the run that has the waveform, if there are several; loads are in all.
    Raises ValueError for a resistance that is not positive, and in a run where edges lie in walls.
    """

    component: str
    where: Where
    resistance: float
    waveform: Waveform | None = None
    shot: int | None = None

    def __post_init__(self) -> None:
        if not self.resistance > 0:
            raise ValueError(f"resistance of a port: positive, in ohm, not {self.resistance}")
        if self.waveform is not None:
            check_waveform(self.waveform, "port")

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

    along: axis of propagation, "x", "y" or "z"; a current towards `sign` (1 or -1) along it counts as positive, into
    the device. height: axis from ground to strip. strip: (first, last) node across. place: node along. ground, top:
    nodes in height.

    As a monitor it stands for its `parts`. Raises ValueError for axes or edges that enclose nothing.
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
        self.check()
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

    def check(self) -> None:
        prefix = f"line {self.name}:"
        if {self.along, self.height} - set("xyz") or self.along == self.height:
            raise ValueError(
                f"{prefix} two of the axes x, y and z, not along {self.along!r} and height {self.height!r}"
            )
        nodes = (*self.strip, self.place, self.ground, self.top) if isinstance(self.strip, tuple | list) else ()
        if len(nodes) != 5 or not all(hasattr(x, "__index__") for x in nodes):
            raise ValueError(f"{prefix} places are numbers of nodes, and of a strip two, not {self.strip}, "
                             f"{self.place}, {self.ground} and {self.top}")  # fmt: skip
        first, last = self.strip
        if not 1 <= first <= last:
            raise ValueError(
                f"{prefix} a strip from its first node, at least 1, to its last one, not {first} to {last}"
            )
        if not 0 <= self.ground < self.top:
            raise ValueError(f"{prefix} a ground below the top, in nodes, not {self.ground} and {self.top}")
        if self.place < 1 or self.sign not in (1, -1):
            raise ValueError(f"{prefix} a place of at least 1 and a sign of 1 or -1, not {self.place} and {self.sign}")

    def voltage_and_current(self, result: Result) -> tuple[Tensor, Tensor]:
        """V in volts and I in amperes, (..., steps) each: V at the end of steps, I in their middle and as the mean of
        both sides of the plane. Raises KeyError unless the line was a monitor of the run."""
        grid = result.grid
        v, w = ("xyz".index(x) for x in (self.along, self.height))
        u = 3 - v - w
        field, above, below, left, right = (result[x.name] for x in self.parts)
        axis = -1 if u < w else -2
        voltage = -(field.sum(axis) * grid.lengths[w]).mean(-1)
        cyclic = 1 if (w, u, v) in ((0, 1, 2), (1, 2, 0), (2, 0, 1)) else -1
        strip = (above - below).sum(-2 if u < v else -1)
        current = (grid.lengths[u] * strip + grid.lengths[w] * (left - right)).mean(-1)
        return voltage, current * (self.sign * cyclic)


def spectrum(x: Tensor, times: Tensor, frequencies: Tensor) -> Tensor:
    """sum x exp(-2 pi i f t): complex (..., frequencies) of (..., times)."""
    angle = -2 * pi * frequencies.double()[:, None] * times
    return x.to(torch.complex128) @ torch.polar(torch.ones(()).double(), angle).T


def waves(line: LinePlane, result: Result, frequencies: Tensor, impedance: float = 50.0) -> tuple[Tensor, Tensor]:
    """(a, b), the waves into and out of the device in sqrt(W) / Hz over dt: complex128 (..., frequencies), with the
    shots of the run in front if there are several.

    frequencies: Hz, (frequencies). impedance: ohm. Raises ValueError above the Nyquist frequency of the steps.
    """
    check_frequencies(frequencies, 0.5 / result.dt)
    if not 0 < impedance < inf:
        raise ValueError(f"impedance of a line: positive, in ohm, not {impedance}")
    voltage, current = line.voltage_and_current(result)
    times = torch.arange(1, voltage.shape[-1] + 1, dtype=torch.float64) * result.dt
    v = spectrum(voltage, times, frequencies)
    i = spectrum(current, times - result.dt / 2, frequencies)
    return (v + impedance * i) / (2 * sqrt(impedance)), (v - impedance * i) / (2 * sqrt(impedance))


def s_parameters(lines: Sequence[LinePlane], result: Result, frequencies: Tensor, impedance: float = 50.0) -> Tensor:
    """S_i1 of a run that drives the first line: complex128 (lines, frequencies), or (lines, shots, frequencies).

    lines: monitors of the run. frequencies: Hz, (frequencies). impedance: impedance of the lines in ohm.
    Warns if the run ends before the waves have decayed. Raises ValueError for frequencies above the Nyquist frequency
    of the steps or that the first line does not carry in any shot, and for a run that continues another one; KeyError
    for lines that are not monitors of the run.
    """
    if isinstance(lines, LinePlane) or not lines or not all(isinstance(x, LinePlane) for x in lines):
        raise ValueError(f"lines: a list of them, the driven one first, not {lines}")
    waves_of_lines = [waves(x, result, frequencies, impedance) for x in lines]
    a = waves_of_lines[0][0]
    check_decayed(lines, result)
    check_band(lines[0], result, frequencies, a, impedance)
    return torch.stack([b / a for _, b in waves_of_lines])


def check_frequencies(frequencies: Any, nyquist: float) -> None:
    if not isinstance(frequencies, Tensor) or frequencies.ndim != 1 or not len(frequencies):
        raise ValueError(f"frequencies: a tensor of numbers in Hz, not {brief(frequencies)}")
    for x in frequencies.tolist():
        if not 0 <= x <= nyquist:
            raise ValueError(f"frequencies: from 0 to half the rate of the steps, {nyquist:.4g} Hz, not {x:.4g} Hz")


@torch.no_grad()
def check_decayed(lines: Sequence[LinePlane], result: Result) -> None:
    """Warns if the voltage has not decayed at the end. Raises ValueError without one, or without its beginning."""
    voltages = [x.voltage_and_current(result)[0].abs() for x in lines]
    if (missing := result.steps - voltages[0].shape[-1]) > 0:
        raise ValueError(f"the run continues another one of {missing} steps, which its lines have not recorded: "
                         "S-parameters need a single run from rest")  # fmt: skip
    peak = max(float(v.max()) for v in voltages)
    if not peak > 0:
        raise ValueError(f"lines {', '.join(x.name for x in lines)}: no voltage in {voltages[0].shape[-1]} steps")
    for line, v in zip(lines, voltages, strict=True):
        steps = v.shape[-1]
        last = float(v[..., steps - max(1, steps // 20) :].max()) / peak
        if last > DECAYED:
            warn(f"line {line.name}: in the last twentieth of {steps} steps the voltage still reaches {last:.1%} of "
                 f"the peak; S-parameters need less than {DECAYED:.0%}: run more steps", stacklevel=4)  # fmt: skip


@torch.no_grad()
def check_band(line: LinePlane, result: Result, frequencies: Tensor, a: Tensor, impedance: float) -> None:
    """Raises ValueError where the wave of the driven line is too weak in every shot."""
    voltage, current = (torch.fft.rfft(x.double()) for x in line.voltage_and_current(result))
    band = torch.fft.rfftfreq(result[line.parts[0].name].shape[-3], result.dt, dtype=torch.float64)
    half = torch.polar(torch.ones_like(band), pi * band * result.dt)  # the current is read half a step earlier
    backward = (voltage + impedance * half * current).abs() / (2 * sqrt(impedance))
    backward = backward.reshape(-1, len(band)).amax(0)
    least = WEAKEST * float(backward.max())
    wrong = (a.abs().reshape(-1, len(frequencies)).amax(0) < least).nonzero()
    if len(wrong):
        f, there = float(frequencies[wrong[0, 0]]), band[backward >= least]
        low, high = float(there[0]), float(there[-1])
        raise ValueError(f"line {line.name}: its wave at {f:.4g} Hz is below {WEAKEST:g} of its peak; the source "
                         f"reaches from {low:.3g} to {high:.3g} Hz")  # fmt: skip
