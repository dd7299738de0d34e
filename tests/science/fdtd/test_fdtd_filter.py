"""Sheen's low-pass filter against what is published of it (IEEE Trans. MTT 38, 849, figure 7)."""

from __future__ import annotations

import pytest
import torch

from tutti.science.em.fdtd import Grid, LinePlane, gaussian_up_to, microstrip
from tutti.science.em.fdtd.excitation.ports import waves
from tutti.science.em.fdtd.simulation import Result

pytestmark = pytest.mark.starts


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("along, height", [("y", "z"), ("x", "z"), ("z", "x"), ("x", "y")])
def test_a_line_sees_a_wave_that_travels_one_way(along, height, sign):
    """Fields of a wave on a line of 50 ohm, exactly, where the grid has them. What seems to come back, in dB."""
    v, w = "xyz".index(along), "xyz".index(height)
    cell, speed, dt, steps, wave = 0.4e-3, 2.2e8, 0.5e-12, 1500, gaussian_up_to(20e9)
    cyclic = 1 if (w, 3 - v - w, v) in ((0, 1, 2), (1, 2, 0), (2, 0, 1)) else -1
    line = LinePlane("in", along, height, (14, 20), 30, 0, 3, sign)
    time, values = torch.arange(steps, dtype=torch.float64)[:, None] * dt, {}
    for part, factor in zip(line.parts, (-1 / cell, 0, 0, sign * cyclic / 50 / cell, 0), strict=True):
        e = part.component[0] == "E"
        places = torch.tensor([30.0] if e else [29.5, 30.5], dtype=torch.float64)
        x = factor * wave(time + (dt if e else dt / 2) - sign * places * cell / speed)
        shape = [2 if i == v else 1 for i, x in enumerate(part.where) if isinstance(x, slice)]
        values[part.name] = x.reshape(steps, *shape)
    frequencies, grid = torch.tensor([1e9, 5e9, 20e9]), Grid((72, 68, 70), cell)
    a, b = waves(line, Result(values, [], grid, dt), frequencies)
    db = 20 * torch.log10((b / a).abs())
    assert db[0] < -80 and db[1] < -65 and db[2] < -40


@pytest.mark.slow
def test_low_pass_filter():
    frequencies = torch.linspace(0.5e9, 20e9, 391)
    s = microstrip.solve(frequencies)
    db = 20 * torch.log10(s.abs())
    assert float(s.abs().square().sum(0).max()) < 1.01  # passive

    def lowest(row: int, low: float, high: float) -> float:
        inside = (frequencies >= low) & (frequencies <= high)
        return float(frequencies[inside][db[row][inside].argmin()])

    corner = float(frequencies[(db[1] < -3).nonzero()[0]])
    assert corner == pytest.approx(5.64e9, rel=0.02)
    assert lowest(1, 6.5e9, 7.6e9) == pytest.approx(7.04e9, rel=0.02)
    assert lowest(1, 7.6e9, 9e9) == pytest.approx(8.37e9, rel=0.02)
    assert lowest(0, 10e9, 12e9) == pytest.approx(11.08e9, rel=0.005)
    assert float(db[1][(frequencies - 12e9).abs().argmin()]) == pytest.approx(-1.1, abs=0.3)
