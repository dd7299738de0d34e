"""Waveforms: functions of time in seconds, of float64 tensors."""

from __future__ import annotations

from collections.abc import Callable
from math import pi

import torch
from torch import Tensor

Waveform = Callable[[Tensor], Tensor]


def gaussian(width: float, delay: float) -> Waveform:
    """exp(-((t - delay) / width)^2)"""
    return lambda t: torch.exp(-(((t - delay) / width) ** 2))


def gaussian_up_to(frequency: float) -> Waveform:
    """A Gaussian with energy up to about `frequency` in Hz: width 0.5 / frequency, delay 4.5 widths."""
    return gaussian(0.5 / frequency, 4.5 * 0.5 / frequency)


def pulse(frequency: float, bandwidth: float) -> Waveform:
    """A sine with a Gaussian envelope; its spectrum falls to 1/e at `frequency` +- `bandwidth`, in Hz."""
    width = 1 / (pi * bandwidth)
    delay = 4.5 * width
    return lambda t: torch.sin(2 * pi * frequency * (t - delay)) * torch.exp(-(((t - delay) / width) ** 2))
