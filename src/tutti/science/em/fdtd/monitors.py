"""Monitors: what is read of the fields. After step n, E is known at (n + 1) dt and H at (n + 1/2) dt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.science.em.fdtd.sources import Where


def check_every(monitor: Snapshots | Spectrum | Energy) -> None:
    if monitor.every < 1:
        raise ValueError(f"every: at least one step, not {monitor.every}, for the monitor {monitor.name}")


@dataclass(frozen=True)
class Probe:
    """A component at points over time: (steps, points), after an axis of shots if there are several."""

    name: str
    component: str
    points: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Snapshots:
    """A component in a region after every so many steps: (times, *region). Integers in `where` drop an axis."""

    name: str
    component: str
    where: Where
    every: int = 1

    def __post_init__(self) -> None:
        check_every(self)


@dataclass(frozen=True)
class Spectrum:
    """The running Fourier sum dt sum x(t) exp(-2 pi i f t) of a component: complex (frequencies, *region).

    every: of so many steps one counts, and at least two in a period.
    """

    name: str
    component: str
    where: Where
    frequencies: Tensor
    every: int = 1

    def __post_init__(self) -> None:
        check_every(self)
        f = torch.as_tensor(self.frequencies)
        if f.ndim != 1 or not bool(torch.isfinite(f).all()):
            raise ValueError(f"frequencies of {self.name}: a list of numbers in Hz, not {f.tolist()}")


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


def phases(monitor: Spectrum, times: Tensor, dt: float) -> Tensor:
    """(steps, frequencies, 2): dt exp(-2 pi i f t). Raises ValueError for fewer than two samples in a period."""
    frequencies = torch.as_tensor(monitor.frequencies, dtype=torch.float64)
    if bool((frequencies.abs() * monitor.every * dt > 0.5).any()):
        raise ValueError(f"monitor {monitor.name}: {float(frequencies.abs().max()):g} Hz needs a sample in every "
                         f"{0.5 / float(frequencies.abs().max()) / dt:.3g} steps, not {monitor.every}")  # fmt: skip
    angle = -2 * torch.pi * times[:, None] * frequencies
    return torch.stack([torch.cos(angle), torch.sin(angle)], -1) * (dt * monitor.every)
