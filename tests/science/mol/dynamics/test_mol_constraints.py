"""Distances that are held, against what Newton's equations say of rigid bodies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tutti.science.mol.cell import wrap
from tutti.science.mol.dynamics import Constraints, Langevin, Simulation, VelocityVerlet, minimize
from tutti.science.mol.dynamics.constraints import whole
from tutti.science.mol.forcefield import ForceField, Nonbonding, water_box
from tutti.science.mol.system import System
from tutti.science.mol.terms import LennardJones
from tutti.science.mol.units import REDUCED


def lengths(x, pairs):
    return (x[:, pairs[:, 1]] - x[:, pairs[:, 0]]).norm(dim=-1)


def chain(atoms: int) -> torch.Tensor:
    return torch.stack([torch.arange(atoms - 1), torch.arange(1, atoms)], 1)


@pytest.mark.parametrize("atoms", [3, 8, 40])
def test_lengths_are_right_and_momentum_stays(atoms):
    """Small clusters go by Newton's method, the chain of 40 by SHAKE and RATTLE."""
    torch.manual_seed(0)
    masses = torch.rand(atoms, dtype=torch.float64) * 10 + 1
    old = torch.cumsum(torch.randn(2, atoms, 3, dtype=torch.float64), 1)
    pairs = chain(atoms)
    if atoms == 3:
        pairs = torch.cat([pairs, torch.tensor([[0, 2]])])
    old = old[:1].repeat(2, 1, 1)
    constraints = Constraints(pairs, lengths(old, pairs)[0], masses)
    x, v = old + 0.05 * torch.randn_like(old), torch.randn_like(old)
    center, momentum = (masses[:, None] * x).sum(1), (masses[:, None] * v).sum(1)
    constraints.positions(old, x, v, 0.1)
    assert torch.allclose(lengths(x, pairs), lengths(old, pairs), rtol=1e-11, atol=0)
    assert torch.allclose((masses[:, None] * x).sum(1), center, rtol=0, atol=1e-11)
    constraints.velocities(x, v)
    along = x[:, pairs[:, 1]] - x[:, pairs[:, 0]]
    assert float(((v[:, pairs[:, 1]] - v[:, pairs[:, 0]]) * along).sum(-1).abs().max()) < 1e-9
    assert torch.allclose((masses[:, None] * v).sum(1), momentum, rtol=0, atol=1e-10)


def test_a_rigid_rotor_turns_with_its_angular_velocity():
    """A dumbbell of two masses in a plane: the angle grows by w t with second-order error, the energy is exact."""
    system = System([[-0.5, 0, 0], [0.5, 0, 0]], masses=1.0, units=REDUCED,
                    velocities=[[0.0, -1.0, 0], [0.0, 1.0, 0]])  # fmt: skip
    field = ForceField([LennardJones(1.0, 0.0, 0.2, tail=False)], [[0, 1]], [1.0])
    angles = []
    for dt in (0.02, 0.01):
        simulation = Simulation(system, field, VelocityVerlet(dt)).run(round(1.0 / dt))
        d = simulation.positions[0, 1] - simulation.positions[0, 0]
        angles.append(float(torch.atan2(d[1], d[0])))
        assert float(simulation.kinetic_energy) == pytest.approx(1.0, rel=1e-12)
    errors = [abs(a - 2.0) for a in angles]  # w = 2
    assert 3.5 < errors[0] / errors[1] < 4.5


def test_rigid_water_keeps_energy_and_geometry():
    system, field = water_box(32, "spce", nonbonding=Nonbonding("reaction_field", 0.45))
    system = minimize(system, field, 500.0, 200)
    simulation = Simulation(system, field, VelocityVerlet(0.001), skin=0.1).thermalize(300.0)
    assert simulation.degrees == 32 * 6 - 3
    simulation.run(100)
    pairs = field.constraints
    assert torch.allclose(lengths(simulation.positions, pairs)[0], field.lengths, rtol=1e-10, atol=0)
    along = simulation.positions[0, pairs[:, 1]] - simulation.positions[0, pairs[:, 0]]
    rate = ((simulation.velocities[0, pairs[:, 1]] - simulation.velocities[0, pairs[:, 0]]) * along).sum(-1)
    assert float(rate.abs().max()) < 1e-9


def test_rigid_water_has_the_temperature_of_its_bath():
    system, field = water_box(32, "tip3p", nonbonding=Nonbonding("reaction_field", 0.45))
    system = minimize(system, field, 500.0, 200)
    simulation = Simulation(system, field, Langevin(0.002, 300.0, 20.0), skin=0.1, seed=2).thermalize(300.0).run(100)
    temperatures = []
    for _ in range(100):
        simulation.run(3)
        temperatures.append(float(simulation.temperature))
    assert sum(temperatures) / 100 == pytest.approx(300.0, rel=0.06)


@pytest.mark.parametrize("skewed", [False, True])
def test_molecules_that_a_file_wraps_become_whole(skewed):
    """Each atom folded by itself: energies and the run are those of whole molecules."""
    system, field = water_box(32, "spce", nonbonding=Nonbonding("reaction_field", 0.35))
    if skewed:
        cell = system.cell.clone()
        cell[0, 2, :2] = 0.4 * cell[0, 0, 0]
        system = replace(system, cell=cell)
    system = minimize(replace(system, positions=system.positions + 0.3), field, 500.0, 200)
    wrapped = replace(system, positions=system.wrapped())
    pairs = field.constraints
    assert float(lengths(wrapped.positions, pairs).max()) > 0.5
    before = wrapped.positions.clone()
    one, other = (Simulation(x, field, VelocityVerlet(0.001), skin=0.05).thermalize(300.0) for x in (system, wrapped))
    assert torch.equal(wrapped.positions, before)
    assert torch.allclose(one.evaluation.energy, other.evaluation.energy, rtol=1e-10)
    one.run(50), other.run(50)
    assert torch.allclose(lengths(other.positions, pairs)[0], field.lengths, rtol=1e-10, atol=0)
    assert torch.allclose(one.forces, other.forces, rtol=0, atol=1e-4)
    assert torch.allclose(one.pressure(), other.pressure(), rtol=1e-6)


def test_a_chain_across_many_faces_becomes_whole():
    """The first atom stays; a molecule longer than the cell keeps its shape, whole ones all of their digits."""
    torch.manual_seed(0)
    pairs = chain(40)[torch.randperm(39)]
    steps = torch.nn.functional.normalize(torch.randn(2, 39, 3, dtype=torch.float64), dim=-1)
    x = torch.cat([torch.zeros(2, 1, 3, dtype=torch.float64), 0.4 * steps.cumsum(1)], 1) + 0.5
    cell = torch.stack([2 * torch.eye(3, dtype=torch.float64), 1.5 * torch.eye(3, dtype=torch.float64)])
    bond_lengths = torch.full((39,), 0.4, dtype=torch.float64)
    same = x.clone()
    whole(same, cell, (True, True, False), pairs, bond_lengths)
    assert torch.equal(same, x)
    folded = wrap(x, cell, (True, True, False))
    whole(folded, cell, (True, True, False), pairs, bond_lengths)
    assert torch.allclose(folded, x, rtol=0, atol=1e-13)


def test_what_cannot_be_held_is_named():
    constraints = Constraints([[0, 1]], [1.0], torch.ones(2, dtype=torch.float64))
    old = torch.tensor([[[0.0, 0, 0], [1.0, 0, 0]]], dtype=torch.float64)
    moved = torch.tensor([[[0.0, 0, 0], [0.0, 5.0, 0]]], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"between atoms \[0, 1\] of replica 0 cannot be held"):
        constraints.positions(old, moved)
    with pytest.raises(ValueError, match=r"atoms \[0, 1\] have no mass"):
        Constraints([[0, 1]], [1.0], torch.zeros(2, dtype=torch.float64))
