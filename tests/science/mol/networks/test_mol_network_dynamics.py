"""Simulations with networks."""

from __future__ import annotations

import pytest
import torch
from mol_structures import molecule

from tutti.science.mol.dynamics import Fire, Simulation, VelocityVerlet
from tutti.science.mol.networks import Network, NetworkPotential, PaiNN, SchNet, compile_for_md
from tutti.science.mol.system import System

KINDS = {"schnet": lambda: SchNet(16, 2, 10, 4.0), "painn": lambda: PaiNN(16, 1, 10, 4.0)}


def network_of(kind: str) -> Network:
    torch.manual_seed(0)
    return KINDS[kind]()


@pytest.mark.starts
@pytest.mark.parametrize("kind", KINDS)
def test_energy_is_conserved_by_kernels_in_single_precision(kind):
    """To the second power of the time step: forces are gradients of the energy that is reported."""
    x = molecule(8, 1, 4.0, None, 4.0)
    system = System(x.positions / 10, x.species, cell=0.4).replicate(2)
    potential = NetworkPotential(compile_for_md(network_of(kind)), x.species)
    drift = []
    for steps, dt in ((40, 0.0004), (80, 0.0002)):
        simulation = Simulation(system, potential, VelocityVerlet(dt), skin=0.03)
        before, most, kinetic = simulation.evaluation.energy.clone(), 0.0, torch.zeros(2)
        for _ in range(steps):
            simulation.run(1)
            kinetic = 0.5 * (simulation.mass * simulation.velocities.square()).sum((1, 2))
            most = max(most, float((simulation.evaluation.energy + kinetic - before).abs().max()))
        assert float(kinetic.min()) > 1
        drift.append(most / float(kinetic.max()))
    assert drift[1] < 0.3 * drift[0] < 0.01


@pytest.mark.starts
def test_structures_are_minimised():
    x = molecule(8, 1, 4.0, None, 4.0)
    network = network_of("painn").double()
    simulation = Simulation(System(x.positions / 10, x.species), NetworkPotential(network, x.species), Fire())
    before = float(simulation.evaluation.energy)
    simulation.run(60)
    assert float(simulation.evaluation.energy) < before
