"""Enhanced sampling on systems whose distributions are known."""

from __future__ import annotations

import math

import pytest
import torch

from tutti.science.mol.biases import (
    Angle,
    Coordination,
    Distance,
    IntegratedTempering,
    Metadynamics,
    RadiusOfGyration,
    ReplicaExchange,
    Restraint,
    Torsion,
    Variable,
    ladder,
)
from tutti.science.mol.dynamics import Langevin, Simulation
from tutti.science.mol.dynamics.restart import load, save
from tutti.science.mol.forcefield import Nonbonding, water_box
from tutti.science.mol.potential import Potential, Sum
from tutti.science.mol.system import System
from tutti.science.mol.units import REDUCED


class X(Variable):
    """The first coordinate of the first atom."""

    def __call__(self, positions, cell=None, pbc=(True, True, True)):
        return positions[:, 0, 0]


class DoubleWell(Potential):
    """barrier (x^2 - 1)^2 + (y^2 + z^2) / 2 of each atom."""

    name, half = "double_well", None

    def __init__(self, barrier: float) -> None:
        self.barrier = barrier

    def energy(self, positions, cell, pairs):
        x = positions[..., 0]
        return (self.barrier * (x.square() - 1).square() + 0.5 * positions[..., 1:].square().sum(-1)).sum(1)


class Wells(Potential):
    name, half = "wells", None

    def energy(self, positions, cell, pairs):
        return 0.5 * positions.square().sum((1, 2))


def single(replicas: int = 1) -> System:
    system = System([[1.0, 0, 0]], masses=1.0, units=REDUCED)
    return system.replicate(replicas) if replicas > 1 else system


def test_variables_have_their_values():
    x = torch.tensor([[[1.0, 0, 0], [0, 0, 0], [0, 1.0, 0], [0, 1.0, 1.0]]], dtype=torch.float64)
    assert float(Distance(0, 2)(x)) == pytest.approx(2**0.5)
    assert float(Angle(0, 1, 2)(x)) == pytest.approx(math.pi / 2)
    assert float(Torsion(0, 1, 2, 3)(x)) == pytest.approx(-math.pi / 2)
    assert float(Distance([0, 1], 2)(x)) == pytest.approx((0.25 + 1) ** 0.5)
    assert float(RadiusOfGyration([0, 1])(x)) == pytest.approx(0.5)
    assert float(Coordination(1, [0, 2], 1.0)(x)) == pytest.approx(1.0)
    far = x.clone()
    far[0, 0, 0] = 9.0
    cell = 10 * torch.eye(3, dtype=torch.float64)[None]
    assert float(Distance(1, 0, nearest=True)(far, cell)) == pytest.approx(1.0)
    assert float(Distance(1, 0, nearest=True)(far, cell, (False, True, True))) == pytest.approx(9.0)


def test_a_torsion_is_that_of_the_force_field():
    from tutti.science.mol.terms import PeriodicTorsions

    torch.manual_seed(0)
    system = System(torch.randn(5, 4, 3), masses=1.0, units=REDUCED)
    term = PeriodicTorsions([[0, 1, 2, 3]], 1, 0.3, 2.0)
    energy = term.evaluate(system.positions, None, term.neighbors(system)).energy
    assert torch.allclose(energy, 2.0 * (1 + torch.cos(Torsion(0, 1, 2, 3)(system.positions) - 0.3)))


def test_restraints_go_the_shortest_way_round():
    torsion, pairs = Torsion(0, 1, 2, 3), None
    x = torch.tensor([[[1.0, 0.1, 0], [0, 0, 0], [0, 0, 1.0], [-1.0, 0, 1.0]]], dtype=torch.float64)
    system = System(x, masses=1.0, units=REDUCED)
    restraint = Restraint(torsion, -math.pi + 0.05, 10.0)
    away = float(torsion(x)) - (-math.pi + 0.05)
    energy = float(restraint.evaluate(x, None, restraint.neighbors(system)).energy)
    assert pairs is None and away > 6 and energy == pytest.approx(5 * (away - 2 * math.pi) ** 2)
    wall = Restraint(Distance(0, 3), 1.0, 10.0, side="lower")
    assert float(wall.evaluate(x, None, wall.neighbors(system)).energy) == 0.0


def test_umbrella_windows_have_their_means():
    """A window k of the harmonic well at 0 has its mean at k s0 / (1 + k)."""
    centers = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)
    potential = Sum([Wells(), Restraint(X(), centers, 4.0)])
    simulation = Simulation(single(3), potential, Langevin(0.2, 0.2, 2.0), seed=1, guard=None).run(50)
    values = []
    for _ in range(1500):
        values.append(simulation.run(2).positions[:, 0, 0].clone())
    assert torch.allclose(torch.stack(values).mean(0), 0.8 * centers, atol=0.03)


def test_metadynamics_finds_the_free_energy_of_a_double_well(tmp_path):
    """In x the free energy is the potential, as y and z do not depend on it."""
    barrier, kt = 5.0, 1.0
    bias = Metadynamics([X()], [0.15], 0.6, 20, kt, factor=6.0, ranges=[(-2.0, 2.0)])
    potential = Sum([DoubleWell(barrier), bias])
    simulation = Simulation(single(8), potential, Langevin(0.03, kt, 2.0), seed=2, guard=None).thermalize(kt)
    simulation.run(6000, [bias])
    (x,), free = bias.free_energy()
    inner = x.abs() < 1.3
    exact = barrier * (x.square() - 1).square()
    wrong = (free - exact)[inner]
    assert float((wrong - wrong.mean()).abs().max()) < 0.7, wrong
    save(simulation, tmp_path / "a")
    other = Metadynamics([X()], [0.15], 0.6, 20, kt, factor=6.0, ranges=[(-2.0, 2.0)])
    again = Simulation(single(8), Sum([DoubleWell(barrier), other]), Langevin(0.03, kt, 2.0), guard=None)
    load(again, tmp_path / "a")
    assert torch.equal(other.grid, bias.grid) and torch.equal(again.forces, simulation.forces)


def test_hills_lie_on_the_grid_as_they_are():
    bias = Metadynamics([X(), Torsion(0, 1, 2, 3)], [0.2, 0.4], 1.0, 1, 1.0, ranges=[(-1.0, 1.0)])
    bias.add(torch.tensor([0.1, 3.0], dtype=torch.float64), 0.7)
    at = torch.tensor([[0.2, -3.1], [0.0, 2.8], [0.5, 0.0], [3.0, 0.0]], dtype=torch.float64)
    turn = torch.tensor([2 * math.pi, 0, 0, 0], dtype=torch.float64)
    u, v = (at[:, 0] - 0.1) / 0.2, (at[:, 1] + turn - 3.0) / 0.4
    exact = 0.7 * torch.exp(-(u.square() + v.square()) / 2)
    exact[3] = 0  # outside
    assert torch.allclose(bias.bias(at), exact, atol=1e-6)


def test_replica_exchange_samples_every_temperature():
    """Oscillators in 3 n dimensions: <U> = 3 n kT / 2, and exchanges happen as often as for gamma distributions."""
    temperature = ladder(1.0, 2.0, 3)
    system = System(torch.zeros(4, 3), masses=1.0, units=REDUCED).replicate(3)
    exchange = ReplicaExchange(5)
    simulation = Simulation(system, Wells(), Langevin(0.3, temperature, 1.0), seed=4, guard=None).thermalize(1.0)
    simulation.run(200)
    energies = []
    for _ in range(3000):
        energies.append(simulation.run(5, [exchange]).evaluation.energy)
    mean = torch.stack(energies).mean(0)
    assert torch.allclose(mean, 6 * temperature, rtol=0.06)
    a, b = (torch.distributions.Gamma(6.0, 1 / t).sample((40_000,)) for t in temperature[:2])
    expected = torch.exp(((1 / temperature[0] - 1 / temperature[1]) * (a - b)).clamp(max=0)).mean()
    assert float(exchange.acceptance[0]) == pytest.approx(float(expected), abs=0.06)
    assert len(set(exchange.walkers.tolist())) == 3


def test_integrated_tempering_samples_and_reweights():
    temperatures = torch.tensor([0.5, 0.8, 1.2, 2.0], dtype=torch.float64)
    system = System(torch.zeros(2, 3), masses=1.0, units=REDUCED).replicate(4)
    potential = IntegratedTempering(Wells(), 1.0, temperatures, 1.0, every=5)
    simulation = Simulation(system, potential, Langevin(0.2, 1.0, 1.0), seed=1, guard=None).thermalize(1.0)
    simulation.run(3000, [potential])
    energies = []
    for _ in range(2500):
        simulation.run(4)
        energies.append(potential.energies)
    energy = torch.cat(energies)
    for t in (0.5, 1.0, 2.0):
        weights = potential.weights(energy, t, 1.0)
        assert float((weights * energy).sum()) == pytest.approx(3 * t, rel=0.1)
    reference = Simulation(system, potential, Langevin(0.2, 1.0, 1.0)).evaluation
    assert torch.allclose(reference.energy, potential.energy(system.positions, None, None))


def test_integrated_tempering_holds_the_constraints_of_all_that_it_wraps():
    system, field = water_box(8, "spce", nonbonding=Nonbonding("reaction_field", 0.3))
    restraint = Restraint(Distance(0, 3, nearest=True), 0.3, 100.0)
    for potential in (field, Sum([field, restraint])):
        tempered = IntegratedTempering(potential, 300.0, [290.0, 350.0], system.units.boltzmann)
        simulation = Simulation(system, tempered, Langevin(0.001, 300.0, 1.0), guard=None)
        assert simulation.constraint_count == 24 and simulation.constraints is not None


def test_a_bias_that_the_run_would_not_feel_is_refused():
    tempering = IntegratedTempering(Wells(), 1.0, [0.5, 2.0], 1.0, every=1)
    for bias in (Metadynamics([X()], [0.1], 1.0, 1, 1.0, ranges=[(-2.0, 2.0)]), tempering):
        with pytest.raises(ValueError, match=f"{bias.name} is a callback .* potential, wells, does not include it"):
            Simulation(single(), Wells(), Langevin(0.1, 1.0, 1.0)).run(1, [bias])
        whole = Sum([Restraint(X(), 0.0, 1.0), bias])
        Simulation(single(), whole, Langevin(0.1, 1.0, 1.0)).run(1, [bias])
    assert tempering.energies.shape == (1,) and int(tempering.calls) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Torsion(0, 1, 1, 2), "names an atom twice"),
        (lambda: Distance([], 1), "is empty or names an atom twice"),
        (lambda: Torsion(0, 1, 2, -3), "a variable names atom -3"),
        (lambda: Coordination(-1, [0], 1.0), "a variable names atom -1"),
        (lambda: Distance(0, 9)(torch.zeros(1, 3, 3)), r"a variable names atom 9, but there are 3 atoms"),
        (lambda: Angle(0, 1, 3)(torch.zeros(1, 3, 3)), r"a variable names atom 3, but there are 3 atoms"),
        (lambda: Restraint(X(), 0.0, -1.0), "stiffness -1.0 is negative"),
        (lambda: Restraint(X(), 0.0, math.inf), "stiffness inf is negative or not finite"),
        (
            lambda: Simulation(single(), Restraint(X(), torch.ones(3), 1.0), Langevin(0.1, 1.0, 1.0)),
            "there are 3 centers of a restraint for 1 replica",
        ),
        (lambda: Restraint(X(), math.nan, 1.0), "center of a restraint must be finite, but entry 0 is nan"),
        (lambda: Metadynamics([X()], [0.1], 1.0, 1, 1.0), "the range None of X cannot be"),
        (lambda: Metadynamics([X()], [0.001], 1.0, 1, 1.0, ranges=[(0.0, 1.0)]), "finer than the grid's steps"),
        (lambda: Metadynamics([X()], [0.1], 1.0, 1, 1.0, factor=1.0), "the bias factor is above 1"),
        (lambda: ladder(2.0, 1.0, 3), "a ladder of 3 temperatures"),
        (lambda: IntegratedTempering(Wells(), 3.0, [1.0, 2.0], 1.0), "that enclose 3.0"),
        (lambda: ReplicaExchange(5)(Simulation(single(), Wells(), Langevin(0.1, 1.0, 1.0))), "a temperature for each"),
    ],
)
def test_what_biases_refuse(make, message):
    with pytest.raises(ValueError, match=message):
        make()
