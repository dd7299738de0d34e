"""Whether cells resolve the wavelengths of the sources: below about eight cells per wavelength, the dispersion of the
second-order scheme slows waves by several per cent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tutti.science.em.fdtd.grid import C0, Grid
from tutti.science.em.fdtd.waveforms import SIGNIFICANT

CELLS = 8  # per wavelength
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
    found = torch.fft.rfft(samples.detach() * torch.hann_window(n, False, dtype=samples.dtype)).abs()
    if not found.max() > 0:
        return 0.0
    last = int((found >= SIGNIFICANT * found.max()).nonzero()[-1])
    return max(0, last - 2) / (n * dt)  # the window widens a line by two places


def coarse(grid: Grid, sources: Sequence[tuple[Any, Tensor]], dt: float, eps_r: float, mu_r: float) -> Iterator[str]:
    """A warning if cells are too large. sources: waveforms and their samples. eps_r, mu_r: the largest of the model."""
    f = max((highest(*x, dt) for x in sources), default=0.0)
    cell = max(x for x, n in zip(grid.lengths, grid.shape, strict=True) if n > 1 or grid.cells == 1)
    index = (eps_r * mu_r) ** 0.5
    wavelength = C0 / max(f * index, 1e-300)
    if wavelength < CELLS * cell:
        yield (f"{wavelength / cell:.2g} cells per wavelength: sources reach {f:.3g} Hz, where waves in the densest "
               f"medium (index {index:.3g}) are {wavelength:.3g} m long, and cells are {cell:.3g} m; use {CELLS} or "
               f"more, cells of at most {wavelength / CELLS:.3g} m")  # fmt: skip
