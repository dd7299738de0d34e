"""Observables on configurations with known answers."""

from __future__ import annotations

import pytest
import torch

from tutti.science.mol.dynamics import Langevin, Simulation
from tutti.science.mol.observables import MeanSquaredDisplacement, RadialDistribution, standard_error
from tutti.science.mol.potential import Potential
from tutti.science.mol.system import System
from tutti.science.mol.units import REDUCED


class Nothing(Potential):
    name = "nothing"

    def energy(self, positions, cell, pairs):
        return 0.0 * positions.sum((1, 2))


def test_an_ideal_gas_has_no_structure():
    torch.manual_seed(0)
    cell = torch.tensor([[[4.0, 0, 0], [1.0, 5.0, 0], [-1.0, 0.5, 6.0]]], dtype=torch.float64)
    all_pairs, of_kinds = (
        RadialDistribution(3.0, 12),
        RadialDistribution(3.0, 12, first=torch.arange(50), second=torch.arange(50, 200)),
    )
    for _ in range(16):
        x = torch.rand(1, 200, 3, dtype=torch.float64) @ cell[0]
        for g in (all_pairs, of_kinds):
            g.add(x, cell, (True, True, True))
    for g in (all_pairs, of_kinds):
        assert ((g.g - 1).abs() < 5 * g.error.clamp(min=0.01)).all()


def test_a_lattice_has_its_shells():
    grid = torch.cartesian_prod(*[torch.arange(4, dtype=torch.float64)] * 3)[None]
    g = RadialDistribution(2.0, 200)
    g.add(grid, 4 * torch.eye(3, dtype=torch.float64)[None], (True, True, True))
    peaks = g.r[g.g > 0]
    assert torch.allclose(peaks, torch.tensor([1.0, 2**0.5, 3**0.5], dtype=torch.float64), atol=0.006)


def test_free_langevin_particles_diffuse():
    """D = kT / (m friction)."""
    system = System(torch.zeros(400, 3), masses=2.0, units=REDUCED)
    msd = MeanSquaredDisplacement(every=5)
    Simulation(system, Nothing(), Langevin(0.1, 3.0, 1.5), seed=2, guard=None).thermalize(3.0).run(2000, [msd])
    assert msd.coefficient() == pytest.approx(3.0 / (2.0 * 1.5), rel=0.1)


def test_standard_errors_of_correlated_series():
    """An autoregressive series with coefficient a has a standard error larger by sqrt((1 + a) / (1 - a))."""
    torch.manual_seed(0)
    noise, a = torch.randn(40_000, dtype=torch.float64), 0.9
    x = [0.0]
    for e in noise.tolist():
        x.append(a * x[-1] + e)
    series = torch.tensor(x, dtype=torch.float64)
    exact = float(series.std()) / len(series) ** 0.5 * ((1 + a) / (1 - a)) ** 0.5
    assert standard_error(series) == pytest.approx(exact, rel=0.35)
