"""Monitors: what is read of the fields. After step n, E is known at (n + 1) dt and H at (n + 1/2) dt."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tutti.science.em.fdtd.excitation.sources import Where
from tutti.science.em.shown import Brief, brief


def check_every(monitor: Snapshots | Spectrum | Energy) -> None:
    if not hasattr(monitor.every, "__index__") or monitor.every < 1:
        raise ValueError(f"every: at least one step, not {monitor.every}, for the monitor {monitor.name}")


@dataclass(frozen=True)
class Probe:
    """A component at points over time, in V/m or A/m: (steps, points), after an axis of shots if there are several.

    points: indices of nodes, one per axis, which for all monitors are numbers of cells from the first node.
    """

    name: str
    component: str
    points: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        listed = hasattr(self.points, "__len__") and len(self.points) > 0
        if not listed or not all(hasattr(x, "__len__") for x in self.points):
            raise ValueError(f"points of {self.name}: a list of them, such as [(40, 30)], not {self.points}")


@dataclass(frozen=True)
class Snapshots:
    """A component in a region after every so many steps, in V/m or A/m: (times, *region), after an axis of shots.

    where: a node or a slice of nodes by axis; nodes drop their axis.
    """

    name: str
    component: str
    where: Where
    every: int = 1

    def __post_init__(self) -> None:
        check_every(self)


@dataclass(frozen=True, repr=False)
class Spectrum(Brief):
    """The running Fourier sum dt sum x(t) exp(-2 pi i f t) of a component, in V s/m or A s/m: complex (frequencies,
    *region), after an axis of shots. frequencies: Hz.

    every: steps between samples; a period has at least two samples.
    """

    name: str
    component: str
    where: Where
    frequencies: Tensor
    every: int = 1

    def __post_init__(self) -> None:
        check_every(self)
        frequencies = self.frequencies
        f = torch.as_tensor(frequencies if isinstance(frequencies, Tensor | np.ndarray | Sequence) else math.nan)
        shown = frequencies.tolist() if isinstance(frequencies, Tensor) else frequencies
        if f.ndim != 1 or not bool(torch.isfinite(f).all()):
            raise ValueError(f"frequencies of {self.name}: a list of numbers in Hz, not {shown}")


@dataclass(frozen=True, repr=False)
class Side(Spectrum):
    """A part of the surface of a far field: `box` of nodes, (first, last) by axis."""

    box: Sequence[tuple[int, int]] = ()

    @staticmethod
    def check(box: Sequence[tuple[int, int]], axes: int) -> None:
        if len(box) != axes or not all(len(ends) == 2 and 1 <= ends[0] < ends[1] for ends in box):
            count = ("two", "three")[axes - 2]
            raise ValueError(f"box: (first, last) node, from 1 on, for each of {count} axes, not {brief(box)}")

    @staticmethod
    def recorded(monitors: Sequence[Any], box: Sequence[tuple[int, int]], frequencies: Tensor) -> None:
        """Raises ValueError unless the monitors of a run include this surface."""
        sides = [x for x in monitors if isinstance(x, Side)]
        if not sides:
            raise ValueError("the run has no surface of a far field: monitors=surface(box, frequencies), or surface3d")
        theirs, ours = (torch.as_tensor(x).double() for x in (sides[0].frequencies, frequencies))
        if [tuple(x) for x in sides[0].box] != [tuple(x) for x in box]:
            raise ValueError(f"box: the run has the surface {sides[0].box}, not {box}")
        if not torch.equal(theirs, ours):
            raise ValueError(f"frequencies: the run has {theirs.tolist()} Hz, not {ours.tolist()} Hz")


@dataclass(frozen=True)
class Energy:
    """The energy of all fields in joules (J/m in two dimensions) before steps 0, every, 2 every, ...: float64 (times).

    See `energy`. On the CPU; without gradients.
    """

    name: str
    every: int = 1

    def __post_init__(self) -> None:
        check_every(self)


Monitor = Probe | Snapshots | Spectrum | Energy


def expanded(monitors: Sequence[Any]) -> tuple[Monitor, ...]:
    """The monitors of a list; those of a line of a port are its `parts`. Raises ValueError for anything else."""
    if not isinstance(monitors, Sequence) or isinstance(monitors, str) or hasattr(monitors, "parts"):
        raise ValueError(f"monitors: a list of them, not {brief(monitors)}: write [...] around it")
    out: list[Monitor] = []
    for x in monitors:
        parts = getattr(x, "parts", (x,))
        if not all(isinstance(part, Monitor) for part in parts):
            hint = ": unpack it with *" if isinstance(x, list | tuple) else ""
            raise ValueError(f"monitors: Probe, Snapshots, Spectrum, Energy or LinePlane, not {brief(x)}{hint}")
        out += parts
    return tuple(out)


def empty(monitors: Sequence[Any], steps: int) -> Iterator[str]:
    """A warning for each monitor of a run from rest that is too short for it."""
    for x in monitors:
        if getattr(x, "every", 1) > steps:
            yield f"monitor {x.name}: every {x.every} steps, of a run of {steps}, sees nothing of it"


def phases(monitor: Spectrum, times: Tensor, dt: float) -> Tensor:
    """(steps, frequencies, 2): dt exp(-2 pi i f t). Raises ValueError for fewer than two samples in a period."""
    frequencies = torch.as_tensor(monitor.frequencies, dtype=torch.float64)
    most = float(frequencies.abs().max()) if len(frequencies) else 0.0
    if most * dt > 0.5:
        raise ValueError(f"monitor {monitor.name}: {most:g} Hz is above the Nyquist frequency of the time step, "
                         f"{0.5 / dt:g} Hz")  # fmt: skip
    if most * monitor.every * dt > 0.5:
        raise ValueError(f"monitor {monitor.name}: {most:g} Hz needs a sample in every "
                         f"{0.5 / most / dt:.3g} steps, not {monitor.every}")  # fmt: skip
    angle = -2 * torch.pi * times[:, None] * frequencies
    return torch.stack([torch.cos(angle), torch.sin(angle)], -1) * (dt * monitor.every)
