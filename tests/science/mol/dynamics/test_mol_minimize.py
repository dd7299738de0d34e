"""Minimisers: FIRE and torch's optimizers find the same minimum."""

from __future__ import annotations

import pytest
import torch
from mol_systems import fluid, lennard_jones, oscillator

from tutti.science.mol.dynamics import Descent, Fire, Simulation, minimize
from tutti.science.mol.dynamics.minimize import largest_force
from tutti.science.mol.forcefield import Nonbonding, water_box
from tutti.science.mol.system import System
from tutti.science.mol.units import REDUCED


@pytest.mark.parametrize(
    "minimizer",
    [Fire(), Descent(torch.optim.LBFGS, lr=1.0, line_search_fn="strong_wolfe"), Descent(torch.optim.Adam, lr=0.01)],
    ids=["fire", "lbfgs", "adam"],
)
def test_a_spring_relaxes(minimizer):
    system, spring = oscillator()
    relaxed = minimize(system, spring, 1e-4, 2000, minimizer)
    assert float((relaxed.positions[0, 1] - relaxed.positions[0, 0]).norm()) == pytest.approx(1.0, abs=2e-4)
    assert float(system.positions[0, 1, 0]) == 1.2, "the system that was given stays"


def test_a_cluster_of_13_atoms_is_an_icosahedron():
    """The global minimum of 13 Lennard-Jones atoms has the energy -44.326801 (Hoare and Pal 1971)."""
    golden = (1 + 5**0.5) / 2
    corners = [(0, s, t * golden) for s in (-1, 1) for t in (-1, 1)]
    shell = [p[-k:] + p[:-k] for p in corners for k in range(3)]
    system = System(torch.tensor([(0.0, 0.0, 0.0), *shell], dtype=torch.float64) * 0.56, masses=1.0, units=REDUCED)
    from tutti.science.mol.terms import LennardJones

    field = LennardJones(1.0, 1.0, 50.0, tail=False)
    relaxed = Simulation(minimize(system, field, 1e-6, 3000, Fire(most=0.02)), field, Fire())
    assert float(relaxed.evaluation.energy) == pytest.approx(-44.326801, abs=2e-5)


def test_overlapping_atoms_come_apart():
    torch.manual_seed(0)
    system = fluid()
    system.positions += 0.3 * torch.randn_like(system.positions)
    relaxed = Simulation(minimize(system, lennard_jones(), 1.0, 500), lennard_jones(), Fire())
    assert largest_force(relaxed) < 1.0


def test_rigid_water_stays_rigid():
    system, field = water_box(16, "spce", nonbonding=Nonbonding("reaction_field", 0.38))
    before = Simulation(system, field, Fire())
    relaxed = Simulation(minimize(system, field, 50.0, 300), field, Fire())
    assert float(relaxed.evaluation.energy) < float(before.evaluation.energy)
    pairs = field.constraints
    d = (relaxed.positions[0, pairs[:, 1]] - relaxed.positions[0, pairs[:, 0]]).norm(dim=-1)
    assert torch.allclose(d, field.lengths, rtol=1e-9, atol=0)
    with pytest.raises(ValueError, match="Adam cannot hold constraints"):
        minimize(system, field, 1.0, 10, Descent(torch.optim.Adam))
