"""Sheen's low-pass filter against what is published of it (IEEE Trans. MTT 38, 849, figure 7)."""

from __future__ import annotations

import pytest
import torch

from tutti.science.em.fdtd import microstrip

pytestmark = pytest.mark.starts


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
    assert lowest(0, 10e9, 12e9) == pytest.approx(11.08e9, rel=0.02)
    assert float(db[1][(frequencies - 12e9).abs().argmin()]) == pytest.approx(-1.1, abs=0.3)
