"""Claims about molecular dynamics: NIST's equation of state of the Lennard-Jones fluid, drift of the energy, the
distribution of kinetic energies."""

from __future__ import annotations

import pytest
import torch

from tutti.science.mol.dynamics import Langevin, Simulation, VelocityVerlet
from tutti.science.mol.system import System
from tutti.science.mol.terms import LennardJones
from tutti.science.mol.units import MD, REDUCED

NIST = [  # temperature, density, energy per atom, pressure: 500 atoms, cutoff 3, long-range corrections
    (0.851, 0.776, -5.517, 0.030),
    (0.853, 0.780, -5.533, 0.072),
    (0.852, 0.820, -5.803, 0.573),
    (0.851, 0.840, -5.909, 0.910),
    (0.849, 0.860, -6.027, 1.282),
]
REPLICAS = 6  # whose means give the errors: a run of one near the freezing point is correlated for longer than it lasts


def lattice(n: int, density: float, **options) -> System:
    edge = (4 / density) ** (1 / 3)
    corners = torch.tensor([[0, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]], dtype=torch.float64)
    grid = torch.cartesian_prod(*[torch.arange(n, dtype=torch.float64)] * 3)
    return System((grid[:, None] + corners).reshape(-1, 3) * edge, cell=n * edge, **options)


@pytest.mark.parametrize(("temperature", "density", "energy", "pressure"), NIST)
def test_the_lennard_jones_fluid_has_nists_equation_of_state(temperature, density, energy, pressure):
    system = lattice(5, density, masses=1.0, units=REDUCED).replicate(REPLICAS)
    potential = LennardJones(1.0, 1.0, 3.0, tail=True)
    simulation = Simulation(system, potential, Langevin(0.005, temperature, 0.5), skin=0.3, seed=1)
    simulation.thermalize(2.0).run(3000)
    energies, pressures = [], []
    for _ in range(600):
        simulation.run(12)
        energies.append(simulation.evaluation.energy / 500)
        pressures.append(simulation.pressure())
    for series, expected, uncertainty, most in ((energies, energy, 0.002, 0.006), (pressures, pressure, 0.01, 0.035)):
        means = torch.stack(series).mean(0)  # of each replica
        error = float(means.std()) / REPLICAS**0.5
        assert float(means.mean()) == pytest.approx(expected, abs=4 * error + uncertainty)
        assert error < most


def test_argon_keeps_its_energy():
    """3,000 steps of 2 fs at constant energy, 864 atoms: less than 1e-5 epsilon per atom."""
    epsilon, sigma = 0.99607, 0.3405
    system = lattice(6, 1.374 * 602.214076 / 39.948, species="Ar", units=MD)
    potential = LennardJones(sigma, epsilon, 2.5 * sigma, truncation="switch", switch=2.2 * sigma, tail=False)
    simulation = Simulation(system, potential, VelocityVerlet(0.002), skin=0.3 * sigma).thermalize(190.0).run(2000)
    energies = []
    for _ in range(300):
        simulation.run(10)
        energies.append(float(simulation.updater.conserved(simulation)))
    series = torch.tensor(energies, dtype=torch.float64) / (864 * epsilon)
    t = torch.linspace(-0.5, 0.5, len(series), dtype=torch.float64)
    drift = float((t * (series - series.mean())).sum() / t.square().sum())
    assert abs(drift) < 1e-5
    assert 80 < float(simulation.temperature) < 110


def test_kinetic_energies_have_the_canonical_variance():
    """var K / <K>^2 = 2 / (3 N)."""
    system = lattice(2, 0.8, masses=1.0, units=REDUCED).replicate(20)
    potential = LennardJones(1.0, 1.0, 1.6, truncation="force_shift", tail=False)
    simulation = Simulation(system, potential, Langevin(0.004, 1.0, 2.0), seed=3).thermalize(1.0).run(500)
    kinetic = []
    for _ in range(1500):
        simulation.run(10)
        kinetic.append(simulation.kinetic_energy)
    values = torch.stack(kinetic)
    assert float(values.var() / values.mean() ** 2) == pytest.approx(2 / (3 * 32), rel=0.06)
    assert float(values.mean()) == pytest.approx(1.5 * 32, rel=0.01)
