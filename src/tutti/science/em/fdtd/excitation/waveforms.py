"""Waveforms: functions of time in seconds, of float64 tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log, pi, sqrt
from typing import Any

import torch
from torch import Tensor

from tutti.science.em.bounds import check_positive

Waveform = Callable[[Tensor], Tensor]
SIGNIFICANT = 0.1  # of the peak of a spectrum
TAIL = sqrt(-log(SIGNIFICANT))  # where exp(-x^2) has fallen to it


def check_waveform(waveform: Any, what: str) -> None:
    if not callable(waveform) and not isinstance(waveform, Tensor):
        raise ValueError(f"{what}: a waveform is a function of times in seconds, such as gaussian_up_to(1e9), or a "
                         f"tensor with a number per step, not {waveform!r}")  # fmt: skip


@dataclass(frozen=True)
class Gaussian:
    """exp(-((t - delay) / width)^2), in seconds. highest: where its spectrum falls to a tenth, in Hz."""

    width: float
    delay: float

    def __call__(self, t: Tensor) -> Tensor:
        return torch.exp(-(((t - self.delay) / self.width) ** 2))

    @property
    def highest(self) -> float:
        return TAIL / (pi * self.width)


@dataclass(frozen=True)
class Pulse:
    """A sine in Hz with the envelope of a `Gaussian`."""

    frequency: float
    envelope: Gaussian

    def __call__(self, t: Tensor) -> Tensor:
        return torch.sin(2 * pi * self.frequency * (t - self.envelope.delay)) * self.envelope(t)

    @property
    def highest(self) -> float:
        return self.frequency + self.envelope.highest


def gaussian(width: float, delay: float) -> Gaussian:
    """exp(-((t - delay) / width)^2), in seconds. Raises ValueError for a width that is not positive."""
    check_positive("a Gaussian", width=width)
    return Gaussian(width, delay)


def gaussian_up_to(frequency: float) -> Gaussian:
    """A Gaussian with energy up to about `frequency` in Hz: width 0.5 / frequency, delay 4.5 widths.

    Raises ValueError for a frequency that is not positive and finite.
    """
    check_positive("a Gaussian", frequency=frequency)
    return gaussian(0.5 / frequency, 4.5 * 0.5 / frequency)


def pulse(frequency: float, bandwidth: float) -> Pulse:
    """A sine with a Gaussian envelope; its spectrum falls to 1/e at `frequency` +- `bandwidth`, in Hz.

    Raises ValueError for frequencies that are not positive and finite.
    """
    check_positive("a pulse", frequency=frequency, bandwidth=bandwidth)
    width = 1 / (pi * bandwidth)
    return Pulse(frequency, gaussian(width, 4.5 * width))
