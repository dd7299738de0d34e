"""Pressures against finite differences of the volume, and ensembles at constant pressure."""

from __future__ import annotations

import pytest
import torch
from mol_systems import fluid, lennard_jones
from test_mol_integrators import Free

from tutti.science.mol import cell as cells
from tutti.science.mol.dynamics import CellRescaling, Langevin, Simulation, VelocityVerlet, minimize
from tutti.science.mol.forcefield import Nonbonding, water_box
from tutti.science.mol.observables import standard_error
from tutti.science.mol.system import System
from tutti.science.mol.units import REDUCED


def test_an_ideal_gas_has_the_volume_of_its_law():
    """The volume at constant pressure has mean (N + 1) kT / p and variance (N + 1) (kT / p)^2."""
    atoms, replicas = 30, 60
    system = System(torch.rand(replicas, atoms, 3), masses=1.0, cell=[2.85] * 3, units=REDUCED)
    bath = Langevin(0.5, 1.5, 2.0)
    simulation = Simulation(system, Free(), CellRescaling(bath, 2.0, 1.0, 0.006, every=1), seed=4, guard=None)
    simulation.thermalize(1.5).run(400)
    volumes = []
    for _ in range(60):
        simulation.run(20)
        volumes.append(cells.volume(simulation.cell))
    values = torch.stack(volumes)
    expected = (atoms + 1) * 1.5 / 2.0
    assert float(values.mean()) == pytest.approx(expected, rel=0.03)
    assert float(values.var()) == pytest.approx((atoms + 1) * 0.75**2, rel=0.25)


@pytest.mark.parametrize("kind", ["atoms", "molecules"])
def test_pressure_is_the_change_of_energy_with_volume(kind):
    """-dU/dV where the centres of molecules move with the cell, plus the kinetic energy of the centres."""
    if kind == "atoms":
        simulation = Simulation(fluid(), lennard_jones(), VelocityVerlet(0.004)).thermalize(1.0).run(20)
        group = torch.arange(simulation.system.atoms)
    else:
        system, field = water_box(32, "spce", nonbonding=Nonbonding("reaction_field", 0.45, switch=0.36, tail=False))
        simulation = Simulation(minimize(system, field, 500.0, 100), field, VelocityVerlet(0.001), skin=0.05)
        simulation.thermalize(300.0)
        assert simulation.constraints is not None
        group = simulation.constraints.groups
    x, cell, mass = simulation.positions, simulation.cell, simulation.mass
    count = int(group.max()) + 1
    masses = torch.zeros(count, 1, dtype=torch.float64).index_add(0, group, mass)
    zero = torch.zeros(1, count, 3, dtype=torch.float64)
    centers = zero.index_add(1, group, mass * x) / masses
    momenta = zero.index_add(1, group, mass * simulation.velocities)
    kinetic = float((momenta.square() / masses).sum() / 2)
    energies, volumes = [], []
    for strain in (-1e-6, 1e-6):
        moved, deformed = x + strain * centers[:, group], cell * (1 + strain)
        neighbors = simulation.potential.neighbors(simulation.system)
        neighbors.update(moved, deformed)
        energies.append(float(simulation.potential.evaluate(moved, deformed, neighbors).energy))
        volumes.append(float(cells.volume(deformed)))
    static = -(energies[1] - energies[0]) / (volumes[1] - volumes[0])
    expected = static + 2 * kinetic / (3 * float(cells.volume(cell)))
    assert float(simulation.pressure()) == pytest.approx(expected, rel=1e-5)


def test_a_fluid_reaches_its_pressure():
    bath = Langevin(0.005, 1.5, 2.0)
    simulation = Simulation(fluid(density=0.7), lennard_jones(), CellRescaling(bath, 3.0, 0.5, 0.1), seed=1)
    simulation.thermalize(1.5).run(400)
    pressures = []
    for _ in range(150):
        simulation.run(5)
        pressures.append(float(simulation.pressure()))
    series = torch.tensor(pressures)
    assert float(series.mean()) == pytest.approx(3.0, abs=5 * standard_error(series, 8))


def test_what_a_barostat_refuses():
    with pytest.raises(ValueError, match="VelocityVerlet keeps no temperature"):
        CellRescaling(VelocityVerlet(0.1), 1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="the pressure nan of a barostat is not finite"):
        CellRescaling(Langevin(0.1, 1.0, 1.0), float("nan"), 1.0, 1.0)
    with pytest.raises(ValueError, match="constant pressure needs a cell"):
        Simulation(System(torch.zeros(2, 3), masses=1.0), Free(), CellRescaling(Langevin(0.1, 1.0, 1.0), 1.0, 1.0, 1.0))
    masses = torch.ones(108).index_fill(0, torch.tensor([0, 21]), 0.0)
    fixed = System(fluid().positions, masses=masses, cell=fluid().cell, units=REDUCED)
    with pytest.raises(ValueError, match="but 2 of 108 atoms are fixed as they have no mass"):
        Simulation(fixed, lennard_jones(), CellRescaling(Langevin(0.004, 1.0, 1.0), 1.0, 1.0, 1.0))
    hard = CellRescaling(Langevin(0.004, 1.0, 1.0), 1e6, 0.01, 1.0)
    with pytest.raises(ValueError, match="the logarithm of the volume changes by"):
        Simulation(fluid(), lennard_jones(), hard).run(10)
