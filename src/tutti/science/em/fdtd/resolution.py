"""Whether cells resolve the wavelengths of the sources, and the grid is large enough for one.

Below about eight cells per wavelength, the dispersion of the second-order scheme slows waves by several per cent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tutti.science.em.fdtd.excitation.waveforms import SIGNIFICANT
from tutti.science.em.fdtd.grid import C0, Grid

CELLS = 8  # per wavelength
SMALL = 50  # times the diagonal of the grid: a wavelength that is longer is a mistake of units, or has no wave in it
SHORT = 0.01  # of the Courant limit
LEAST = 64  # steps that a spectrum needs


def highest(waveform: Any, samples: Tensor, dt: float) -> float:
    """The frequency in Hz up to which a spectrum exceeds a tenth of its peak. samples: (steps), one every dt.

    Of a waveform that does not know it, from the samples times a Hann window; 0 if they are too few or all zero.
    """
    if hasattr(waveform, "highest"):
        return waveform.highest
    n = len(samples)
    if n < LEAST:
        return 0.0
    spectrum = torch.fft.rfft(samples.detach() * torch.hann_window(n, False, dtype=samples.dtype)).abs()
    if not spectrum.max() > 0:
        return 0.0
    last = int((spectrum >= SIGNIFICANT * spectrum.max()).nonzero()[-1])
    return max(0, last - 2) / (n * dt)  # the window widens a line by two places


def coarse(grid: Grid, sources: Sequence[tuple[Any, Tensor]], dt: float, eps_r: float, mu_r: float) -> Iterator[str]:
    """Warnings if cells are too large, the grid too small, or dt too short. sources: waveforms and their samples.
    eps_r, mu_r: the largest of the model."""
    f = max((highest(*x, dt) for x in sources), default=0.0)
    cell = max(x for x, n in zip(grid.lengths, grid.shape, strict=True) if n > 1 or grid.cells == 1)
    index = (eps_r * mu_r) ** 0.5
    wavelength = C0 / max(f * index, 1e-300)
    extent = sum((x * n) ** 2 for x, n in zip(grid.lengths, grid.shape, strict=True)) ** 0.5
    if f and wavelength > SMALL * extent:
        yield (f"the grid is {extent:.3g} m across, {extent / wavelength:.2g} wavelengths: sources reach {f:.3g} Hz,"
               f" where waves are {wavelength:.3g} m long; frequencies are in Hz (1.4 GHz is 1.4e9) and lengths in"
               " metres")  # fmt: skip
    if dt < grid.courant_limit() * SHORT:
        yield (f"dt = {dt:.3g} s is {dt / grid.courant_limit():.2g} of the Courant limit {grid.courant_limit():.3g} s:"
               " steps hardly advance; leave dt out, or give it in seconds")  # fmt: skip
    if wavelength < CELLS * cell:
        yield (f"{wavelength / cell:.2g} cells per wavelength: sources reach {f:.3g} Hz, where waves in the densest "
               f"medium (index {index:.3g}) are {wavelength:.3g} m long, and cells are {cell:.3g} m; use {CELLS} or "
               f"more, cells of at most {wavelength / CELLS:.3g} m"
               + (" (lengths are in metres, frequencies in Hz)" if wavelength < cell else ""))  # fmt: skip
