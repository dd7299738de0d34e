"""Configurations of simulations as training data."""

from __future__ import annotations

import pytest
import torch
from mol_structures import molecule, teacher

from tutti.science.mol.dynamics import Simulation, VelocityVerlet
from tutti.science.mol.networks import NetworkPotential, Samples, pack
from tutti.science.mol.system import System


@pytest.mark.parametrize("cell", [None, 0.7])
def test_samples_have_the_energies_and_forces_that_moved_the_atoms(cell):
    """The network that computed them gives them again, in its own units and from the edges of the samples."""
    network, x = teacher(), molecule(6, 1, 4.0)
    system = System(x.positions / 10, x.species, cell=cell).replicate(2)
    simulation = Simulation(system, NetworkPotential(network, system.species), VelocityVerlet(0.0005))
    samples = Samples(3, network.cutoff)
    simulation.thermalize(300.0).run(8, [samples])
    assert len(samples.structures) == 2 * 2  # replicas and steps
    batch = pack(samples.structures)
    energy, forces = network.energy_and_forces(batch)
    assert batch.energy is not None and batch.forces is not None
    torch.testing.assert_close(energy, batch.energy)
    torch.testing.assert_close(forces, batch.forces, rtol=1e-6, atol=1e-8)
    assert float((batch.positions[:6] - batch.positions[12:18]).norm()) > 1e-3


def test_what_cannot_be_sampled_is_refused():
    with pytest.raises(ValueError, match="units of samples: one of MD"):
        Samples(1, 5.0, "hartree")
    with pytest.raises(ValueError, match=r"every 0 steps with a cutoff of 5\.0 cannot be"):
        Samples(0, 5.0)
