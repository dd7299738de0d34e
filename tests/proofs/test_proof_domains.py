"""Two and four processes that divide the space of a simulation equal one process over 1,000 steps, within rounding.

Rounding grows, as atoms collide, in every simulation of a liquid: the yardstick is how far a run of one process departs
that begins with one coordinate of one atom changed by the least possible amount.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tutti.science.mol.dynamics import CellRescaling, Langevin, Simulation, VelocityVerlet, minimize
from tutti.science.mol.dynamics.decomposed import DecomposedSimulation
from tutti.science.mol.forcefield import Nonbonding, water_box
from tutti.science.mol.system import System
from tutti.science.mol.terms import LennardJones
from tutti.science.mol.units import REDUCED

pytestmark = pytest.mark.starts
STEPS = 1000


def argon():
    """864 atoms, as Rahman (1964) simulated them, in reduced units, at constant energy."""
    edge, cells = (4 / 0.8442) ** (1 / 3), 6
    corners = torch.tensor([[0, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]], dtype=torch.float64)
    grid = torch.cartesian_prod(*[torch.arange(cells, dtype=torch.float64)] * 3)
    system = System((grid[:, None] + corners).reshape(-1, 3) * edge, masses=1.0, cell=cells * edge, units=REDUCED)
    return system, LennardJones(1.0, 1.0, 2.5, truncation="force_shift"), VelocityVerlet(0.004), 1.4


def water():
    """64 rigid molecules with particle mesh Ewald, at constant temperature and pressure."""
    system, field = water_box(64, "spce", nonbonding=Nonbonding(cutoff=0.6))
    system = minimize(system, field, tolerance=100.0, steps=50)
    return system, field, CellRescaling(Langevin(0.001, 300.0, 1.0), 0.06, 1.0, 7.5e-4), 300.0


def start() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def alone(make, shift: float = 0.0) -> Simulation:
    system, potential, updater, temperature = make()
    if shift:
        x = system.positions.clone()
        x[0, -1, 0] = torch.nextafter(x[0, -1, 0], torch.tensor(shift, dtype=torch.float64))
        system = replace(system, positions=x)
    return Simulation(system, potential, updater, seed=1).thermalize(temperature).run(STEPS)


def among(make, ranks: int):
    groups = [dist.new_group(list(range(k, k + ranks))) for k in range(0, dist.get_world_size(), ranks)]
    system, potential, updater, temperature = make()
    simulation = DecomposedSimulation(system, potential, updater, seed=1, group=groups[dist.get_rank() // ranks])
    simulation.thermalize(temperature).run(STEPS)
    whole = simulation.whole()
    return whole.positions, whole.evaluation.energy, simulation.builds, len(simulation.numbers)


@pytest.mark.parametrize("make", [argon, water])
def test_processes_equal_one_within_rounding(pool, make):
    pool.run(start)
    expected, other = alone(make), alone(make, 100.0)
    rounding = float((other.positions - expected.positions).abs().max())
    for ranks in (2, 4):
        for x, energy, builds, local in pool.run(among, make, ranks):
            assert float((x - expected.positions).abs().max()) < 30 * rounding < 1e-6
            assert float((energy - expected.evaluation.energy).abs()) < 1e-5
            assert builds > 20 and local <= expected.atoms
        print(f"{make.__name__}, {ranks} processes: {float((x - expected.positions).abs().max()):.2g}, one unit in the "
              f"last place of one coordinate: {rounding:.2g}")  # fmt: skip
