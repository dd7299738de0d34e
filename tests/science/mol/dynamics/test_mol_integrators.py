"""Integrators against exact solutions and the laws that they keep."""

from __future__ import annotations

import math

import pytest
import torch
from mol_systems import fluid, lennard_jones, oscillator

from tutti.science.mol.dynamics import Langevin, LeapFrog, NoseHooverChain, Simulation, VelocityVerlet
from tutti.science.mol.dynamics.noise import THERMOSTAT, normal
from tutti.science.mol.observables import standard_error
from tutti.science.mol.potential import Potential
from tutti.science.mol.system import System
from tutti.science.mol.units import REDUCED


class Free(Potential):
    """No forces."""

    name = "free"

    def energy(self, positions, cell, pairs):
        return 0.0 * positions.sum((1, 2))


class Wells(Potential):
    """Each atom in a harmonic well of stiffness 1 at the origin."""

    name = "wells"

    def energy(self, positions, cell, pairs):
        return 0.5 * positions.square().sum((1, 2))


@pytest.mark.parametrize("updater", [VelocityVerlet, LeapFrog])
def test_an_oscillator_moves_with_its_frequency(updater):
    """A dimer of masses m and stiffness k has the frequency sqrt(2 k / m), in the discrete equations
    2 / dt asin(w dt / 2)."""
    system, spring = oscillator(mass=2.0, stiffness=9.0)
    dt, steps = 0.01, 500
    simulation = Simulation(system, spring, updater(dt)).run(steps)
    w = 2 / dt * math.asin(math.sqrt(2 * 9.0 / 2.0) * dt / 2)
    stretch = float((simulation.positions[0, 1] - simulation.positions[0, 0]).norm()) - 1
    assert stretch == pytest.approx(0.2 * math.cos(w * dt * steps), abs=1e-10)


def test_leap_frog_takes_the_path_of_velocity_verlet():
    ends = [Simulation(fluid(), lennard_jones(), updater(0.004), seed=1).thermalize(1.0).run(50)
            for updater in (VelocityVerlet, LeapFrog)]  # fmt: skip
    assert torch.allclose(ends[0].positions, ends[1].positions, rtol=0, atol=1e-12)
    assert torch.allclose(ends[0].velocities, ends[1].velocities, rtol=0, atol=1e-11)


def test_the_error_of_the_energy_is_of_second_order():
    errors = []
    for dt in (0.004, 0.002, 0.001):
        simulation = Simulation(fluid(), lennard_jones(), VelocityVerlet(dt)).thermalize(1.0).run(round(0.2 / dt))
        energies = []
        for _ in range(round(0.4 / dt)):
            simulation.run(1)
            energies.append(float(simulation.updater.conserved(simulation)))
        errors.append(float(torch.tensor(energies).std()))
    orders = [math.log2(errors[0] / errors[1]), math.log2(errors[1] / errors[2])]
    assert all(1.8 < order < 2.2 for order in orders), orders


def test_momentum_is_kept_and_time_runs_backwards():
    simulation = Simulation(fluid(), lennard_jones(), VelocityVerlet(0.004)).thermalize(1.0)
    begin = simulation.positions.clone()
    simulation.run(60)
    assert float((simulation.mass * simulation.velocities).sum(1).abs().max()) < 1e-12
    simulation.velocities.neg_()
    simulation.run(60)
    assert torch.allclose(simulation.positions, begin, rtol=0, atol=1e-9)


@pytest.mark.parametrize("friction", [0.0, 3.0])
def test_langevin_dynamics_of_free_atoms_keeps_their_temperature(friction):
    """The Ornstein-Uhlenbeck process is integrated exactly, for any step: kinetic energies have mean 3/2 N kT and
    relative variance 2 / 3N."""
    system = System(torch.zeros(500, 3), masses=torch.linspace(1, 30, 500), units=REDUCED)
    updater = Langevin(0.5, 2.0, friction)
    simulation = Simulation(system, Free(), updater, seed=3, guard=None).thermalize(2.0)
    kinetic = []
    for _ in range(200):
        simulation.run(1)
        kinetic.append(float(simulation.kinetic_energy) / 1500)
    assert torch.tensor(kinetic).mean() == pytest.approx(1.0, abs=0.02 if friction else 1e-9)
    if friction:
        assert float(torch.tensor(kinetic).var()) == pytest.approx(2 / 1500, rel=0.35)


def test_langevin_dynamics_samples_wells_without_an_error_of_the_step():
    """BAOAB samples a harmonic well exactly in positions, with any stable step (Leimkuhler and Matthews 2013)."""
    system = System(torch.zeros(3000, 3), masses=1.0, units=REDUCED)
    simulation = Simulation(system, Wells(), Langevin(0.8, 1.5, 1.0), seed=1, guard=None).run(60)
    squares = []
    for _ in range(40):
        simulation.run(5)
        squares.append(float(simulation.positions.square().mean()))
    assert sum(squares) / len(squares) == pytest.approx(1.5, rel=0.02)


def test_a_chain_of_thermostats_keeps_its_conserved_energy_and_the_temperature():
    simulation = Simulation(fluid(), lennard_jones(), NoseHooverChain(0.002, 0.9, 0.3)).thermalize(1.8).run(200)
    first = float(simulation.updater.conserved(simulation))
    temperatures = []
    for _ in range(400):
        simulation.run(4)
        temperatures.append(float(simulation.temperature))
    series = torch.tensor(temperatures[100:])
    assert abs(float(simulation.updater.conserved(simulation)) - first) / simulation.system.atoms < 2e-4
    assert float(series.mean()) == pytest.approx(0.9, abs=5 * standard_error(series, 8))


def test_noise_is_normal_and_depends_on_seed_step_replica_and_atom_alone():
    x = normal(7, THERMOSTAT, 11, 4, 5000)
    assert torch.equal(normal(7, THERMOSTAT, 11, 2, 3000), x[:2, :3000])
    assert float(x.mean()) == pytest.approx(0, abs=0.02)
    assert float(x.std()) == pytest.approx(1, abs=0.02)
    assert float((x**4).mean()) == pytest.approx(3, abs=0.15)
    for other in (normal(8, THERMOSTAT, 11, 1, 5000), normal(7, THERMOSTAT, 12, 1, 5000), x[1:2]):
        assert abs(float((x[:1] * other).mean())) < 0.05


def test_replicas_are_runs_of_their_own():
    system = fluid()
    together = Simulation(
        system.replicate(3), lennard_jones(), Langevin(0.004, torch.tensor([0.5, 1.0, 2.0]), 1.0), seed=5
    )
    together.thermalize(1.0).run(60)
    alone = Simulation(system, lennard_jones(), Langevin(0.004, 0.5, 1.0), seed=5).thermalize(1.0).run(60)
    assert torch.allclose(together.positions[0], alone.positions[0], rtol=0, atol=1e-9)
    assert float(together.temperature[2]) > float(together.temperature[0])


def test_atoms_without_mass_stay_where_they_are():
    system = fluid()
    system.masses[:4] = 0
    simulation = Simulation(system, lennard_jones(), Langevin(0.004, 1.0, 1.0)).thermalize(1.0).run(20)
    assert torch.equal(simulation.positions[0, :4], system.positions[0, :4])
    assert simulation.degrees == 3 * (system.atoms - 4)


def test_replicas_start_at_temperatures_of_their_own():
    target = torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64)
    simulation = Simulation(fluid().replicate(3), Free(), VelocityVerlet(0.01)).thermalize(target)
    assert torch.allclose(simulation.temperature, target, rtol=1e-12, atol=0)
    one = Simulation(fluid().replicate(3), Free(), VelocityVerlet(0.01)).thermalize(2.0)
    assert torch.equal(one.velocities[2], simulation.velocities[2])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: VelocityVerlet(0.0), "time step 0.0 is not above 0"),
        (lambda: Langevin(0.1, -1.0, 1.0), "temperature .* is negative"),
        (lambda: Langevin(0.1, 1.0, -1.0), "friction -1.0 is negative"),
        (lambda: NoseHooverChain(0.1, 1.0, 0.0), "period 0.0 cannot be"),
        (lambda: Langevin(0.1, math.nan, 1.0), "temperature .* not finite"),
        (
            lambda: Simulation(
                System([[0.0, 0, 0]] * 2, velocities=[[0.0, 0, 0], [0, math.nan, 0]]), Free(), LeapFrog(1)
            ),
            "the velocity of atom 1 of replica 0 is not finite",
        ),
        (
            lambda: Simulation(fluid(), Free(), LeapFrog(0.1)).thermalize(torch.ones(2)),
            "there are 2 temperatures for 1 replica",
        ),
        (lambda: Simulation(fluid(), Free(), Langevin(0.1, torch.ones(3), 1.0)), "there are 3 temperatures for 1 rep"),
        (
            lambda: Simulation(fluid().replicate(2), Free(), NoseHooverChain(0.1, torch.ones(3), 1.0)),
            "there are 3 temperatures for 2 replicas",
        ),
    ],
)
def test_what_integrators_refuse(make, message):
    with pytest.raises(ValueError, match=message):
        make()
