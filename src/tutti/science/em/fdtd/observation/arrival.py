"""Whether a run is long enough for its monitors: fields arrive, and spectra are taken until fields have decayed.

A running Fourier sum that ends while the field is still x is wrong by about x / (2 pi f): the rest of a field that
oscillates at f and decays. x is the largest within an eighth of a wavelength, as one node may be at a zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import pi, sqrt
from typing import Any

import torch
from torch import Tensor

from tutti.science.em.fdtd.excitation.sources import Entries, places
from tutti.science.em.fdtd.grid import C0, Grid
from tutti.science.em.fdtd.observation.monitors import Energy, Probe, Spectrum
from tutti.science.em.fdtd.problem import Setting

LEFT = 0.1  # of a spectrum: what its end may leave out
STARTED = 1e-3  # of the peak of a waveform
FEW = 1e-3  # of a period: a run that is shorter is a mistake of units
COUNTS = 0.3  # of the peak of a spectrum: frequencies that are looked at


def monitored(grid: Grid, monitor: Any) -> Tensor:
    """Flat nodes of a monitor."""
    if isinstance(monitor, Probe):
        return torch.cat([places(grid, point, f"monitor {monitor.name}")[0] for point in monitor.points])
    return places(grid, monitor.where, f"monitor {monitor.name}")[0]


def nodes(grid: Grid, flat: Tensor) -> Tensor:
    """Indices along x, y and z of flat places, (places, axes)."""
    return torch.stack(torch.unravel_index(flat, grid.nodes), 1)


def started(source: Any, wave: Tensor, dt: float) -> float:
    """Seconds from which a waveform exceeds a thousandth of its peak; of the run, if it does not know its peak."""
    waveform = getattr(source, "waveform", None)
    envelope: Any = getattr(waveform, "envelope", waveform)
    if hasattr(envelope, "delay") and hasattr(envelope, "width"):
        return max(0.0, envelope.delay - 2.63 * envelope.width)  # exp(-2.63^2) = 1e-3
    size = wave.detach().abs()
    return float((size > STARTED * size.max()).nonzero()[0]) * dt if bool(size.any()) else 0.0


def too_early(setting: Setting, sources: Sequence[tuple[Any, Sequence[Entries]]], monitors: Sequence[Any],
              eps_r: float, mu_r: float) -> Iterator[str]:  # fmt: skip
    """A warning for the first monitor that ends before a wave from any source can be there. eps_r, mu_r: the least of
    the model. Plane waves, which enter all of their box, start at their faces."""
    grid, end = setting.grid, setting.steps * setting.dt
    spacing, speed = torch.tensor(grid.lengths, dtype=torch.float64), C0 / sqrt(eps_r * mu_r)
    starts = []
    for source, entries in sources:
        for x in entries[:1]:
            # kernels hold axes in another order: back to x, y, z
            by_axis = torch.unravel_index(x.place, grid.array)
            at = torch.stack([by_axis[d] for d in grid.axes[: len(grid.shape)]], 1)
            starts.append((at.amin(0), at.amax(0), started(source, x.waves[:, 0], setting.dt)))
    for monitor in monitors:
        if isinstance(monitor, Energy) or not starts:
            continue
        at = nodes(grid, monitored(grid, monitor))
        low, high = at.amin(0), at.amax(0)
        arrivals = []
        for first, last, start in starts:
            gap = torch.maximum(first - high, low - last).clamp_min(0)
            arrivals.append(start + float((gap * spacing).norm()) / speed)
        if end < (arrival := min(arrivals)):
            yield (f"monitor {monitor.name}: {setting.steps} steps end at {end:.3g} s, and nothing arrives before"
                   f" {arrival:.3g} s (the source starts, and waves take their way): use"
                   f" {int(arrival / setting.dt) + 1} steps and those of the signal; times are in seconds,"
                   " frequencies in Hz, lengths in metres")  # fmt: skip
            return


def too_slow(monitors: Sequence[Any], duration: float) -> Iterator[str]:
    """A warning for the first spectrum whose frequencies all have periods far beyond the run: 1 GHz given as 1."""
    for monitor in monitors:
        if isinstance(monitor, Spectrum):
            f = float(torch.as_tensor(monitor.frequencies, dtype=torch.float64).abs().max())
            if 0 < f * duration < FEW:
                yield (f"monitor {monitor.name}: frequencies up to {f:.3g} have periods of {1 / f:.3g} s, and the run"
                       f" lasts {duration:.3g} s; frequencies are in Hz (1.4 GHz is 1.4e9)")  # fmt: skip
                return


def not_decayed(grid: Grid, monitors: Sequence[Any], values: Mapping[str, Tensor], fields: Sequence[Tensor],
                steps: int, dt: float) -> Iterator[str]:  # fmt: skip
    """Yield a warning for the spectrum that the end of the run cuts most. fields: field of each component at the end,
    (shots, *grid.array)."""
    worst, text = LEFT, ""
    for monitor in monitors:
        if not isinstance(monitor, Spectrum):
            continue
        f = torch.as_tensor(monitor.frequencies, dtype=torch.float64).abs()
        spectrum = values[monitor.name].detach().abs().double().cpu()
        shots = fields[grid.component(monitor.component)]
        spectrum = spectrum.reshape(len(shots), len(f), -1).amax((0, 2))
        if not bool(spectrum.max() > 0) or not bool(torch.isfinite(spectrum).all()):
            continue
        looked = (f > 0) & (spectrum >= COUNTS * spectrum.max())
        if not bool(looked.any()):
            continue
        at = nodes(grid, monitored(grid, monitor))
        eighth = C0 / (8 * float(f[looked].max()))
        wide = any(float(span) * x >= eighth for span, x in zip(at.amax(0) - at.amin(0), grid.lengths, strict=True))
        box = [slice(None)] * 3
        for axis, d in enumerate(grid.axes[: len(grid.shape)]):
            near = 0 if wide else int(eighth / grid.lengths[axis])
            box[d] = slice(max(int(at[:, axis].min()) - near, 0), int(at[:, axis].max()) + near + 1)
        rest = float(shots[:, *box].detach().abs().max())
        share, k = (rest / (2 * pi * f) / spectrum)[looked].min(0)
        if float(share) > worst:
            worst = float(share)
            text = (f"monitor {monitor.name}: after {steps} steps ({steps * dt:.3g} s) the field has not decayed; it is"
                    f" still {rest:.3g}, which leaves about {worst:.0%} of its spectrum at {float(f[looked][k]):.3g} Hz"
                    " open: run more steps, or go on with after=")  # fmt: skip
    if text:
        yield text
