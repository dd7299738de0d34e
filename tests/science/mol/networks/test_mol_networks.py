"""What all networks owe: invariances, forces, sensitivity to neighbours, packing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mol_structures import molecule, rotation, structure

from tutti.science.mol.networks import MolCT, Network, PaiNN, SchNet, groups, pack

KINDS = {
    "schnet": lambda: SchNet(16, 2, 10, 4.0),
    "painn": lambda: PaiNN(16, 2, 10, 4.0),
    "molct": lambda: MolCT(16, 2, 4, 1, 4.0),
    "molct-cycles": lambda: MolCT(16, 1, 4, 3, 4.0, feedforward=True),
}
CELL = torch.tensor([[5.0, 0.0, 0.0], [1.0, 4.5, 0.0], [-0.5, 0.7, 4.2]], dtype=torch.float64)


@pytest.fixture(params=KINDS)
def network(request) -> Network:
    torch.manual_seed(0)
    network = KINDS[request.param]().double()
    with torch.no_grad():
        for p in network.parameters():  # biases and norms differ from their first values
            p += 0.1 * torch.randn_like(p)
    network.set_references({1: -13.6, 6: -1029.0, 7: -1485.0, 8: -2042.0}, 2.0)
    return network


def test_energies_are_invariant(network):
    x = molecule(9, 1, 4.0)
    energy = network.energy(pack([x]))
    turn, order = rotation(2), torch.randperm(9, generator=torch.Generator().manual_seed(3))
    for positions in (x.positions @ turn.T, x.positions + 7.0, -x.positions, x.positions @ -turn.T):
        assert torch.allclose(network.energy(pack([replace(x, positions=positions)])), energy, rtol=0, atol=1e-9)
    permuted = structure(x.species[order], x.positions[order], 4.0)
    assert torch.allclose(network.energy(pack([permuted])), energy, rtol=0, atol=1e-9)


def test_forces_turn_with_the_structure_and_sum_to_zero(network):
    x, turn = molecule(9, 1, 4.0), rotation(2)
    _, forces = network.energy_and_forces(pack([x]))
    _, turned = network.energy_and_forces(pack([replace(x, positions=x.positions @ turn.T)]))
    assert float(forces.abs().max()) > 1e-3
    assert torch.allclose(turned, forces @ turn.T, atol=1e-9)
    assert float(forces.sum(0).abs().max()) < 1e-9


@pytest.mark.parametrize("cell", [None, CELL], ids=["molecule", "crystal"])
def test_forces_equal_finite_differences(network, cell):
    x = molecule(5, 4, 4.0, cell, 3.5)
    _, forces = network.energy_and_forces(pack([x]))
    step = 1e-4
    for atom, axis in ((0, 0), (2, 1), (4, 2)):
        moved = []
        for sign in (-1, 1):
            positions = x.positions.clone()
            positions[atom, axis] += sign * step
            moved.append(structure(x.species, positions, 4.0, cell))
        low, high = network.energy(pack(moved)).tolist()
        assert -(high - low) / (2 * step) == pytest.approx(float(forces[atom, axis]), rel=1e-5, abs=1e-6)


def test_the_energy_of_a_crystal_is_extensive(network):
    x = molecule(4, 5, 4.0, CELL, 3.0)
    both = torch.cat([x.positions, x.positions + CELL[0]])
    twice = structure(x.species.repeat(2), both, 4.0, CELL * torch.tensor([[2.0], [1.0], [1.0]]))
    with torch.no_grad():
        assert float(network.energy(pack([twice]))) == pytest.approx(2 * float(network.energy(pack([x]))), abs=1e-8)


def test_the_element_of_a_neighbour_matters(network):
    """Central atoms see their neighbours' species, not only where they are."""
    x = molecule(9, 1, 4.0)
    network.set_references({})
    batch, other = pack([x]), x.species.clone()
    other[3] = 8 if int(other[3]) != 8 else 7
    before, after = network.atomic_energies(batch), network.atomic_energies(replace(batch, species=other))
    near = x.i[(x.j == 3) & ((x.positions[x.i] - x.positions[x.j]).norm(dim=1) < 3.5)]
    assert len(near) and float((before - after)[near].detach().abs().min()) > 1e-6


def test_structures_in_a_batch_do_not_interact_and_lone_atoms_have_their_energy(network):
    pieces = [molecule(n, n, 4.0) for n in (5, 1, 8)] + [molecule(4, 9, 4.0, CELL, 3.0)]
    energies, forces = network.energy_and_forces(pack(pieces))
    alone = [network.energy_and_forces(pack([x])) for x in pieces]
    assert torch.allclose(energies, torch.cat([e for e, _ in alone]), rtol=0, atol=1e-9)
    assert torch.allclose(forces, torch.cat([f for _, f in alone]), atol=1e-9)
    assert len(pieces[1].i) == 0 and float(forces[5].abs().max()) == 0


def test_energies_are_continuous_where_an_atom_crosses_the_cutoff(network):
    species, energies = torch.tensor([6, 8, 1]), []
    for d in (3.999999, 4.0, 4.000001):
        positions = torch.tensor([[0.0, 0, 0], [d, 0, 0], [0, 1.1, 0]], dtype=torch.float64)
        energies.append(float(network.energy(pack([structure(species, positions, 4.0)])).detach()))
    assert energies[0] == pytest.approx(energies[1], abs=1e-8) and energies[2] == pytest.approx(energies[1], abs=1e-8)


def test_edges_beyond_the_cutoff_change_nothing(network):
    x = molecule(9, 1, 4.0)
    energy, forces = network.energy_and_forces(pack([x]))
    more, more_forces = network.energy_and_forces(pack([structure(x.species, x.positions, 6.0)]))
    assert torch.allclose(more, energy, rtol=0, atol=1e-9) and torch.allclose(more_forces, forces, atol=1e-9)


def test_float32_weights_keep_the_digits_of_references(network):
    batch = pack([molecule(9, 1, 4.0)])
    exact = network.energy(batch)
    energy = network.float().energy(batch)
    assert energy.dtype == network.references.dtype == torch.float64
    assert float((energy - exact).detach().abs()) < 1e-4  # of 1e4; float32 alone resolves 1e-3


def test_a_batch_stays_within_its_limits():
    pieces = [molecule(n, n, 4.0) for n in (5, 1, 8, 3, 6)]
    order = [4, 2, 0, 1, 3]
    batches = list(groups(pieces, order, 10, 1000))
    assert [n for group in batches for n in group] == order
    assert all(sum(len(pieces[n].species) for n in group) <= 10 for group in batches) and len(batches) == 3
    with pytest.raises(ValueError, match="structure 2 has 8 atoms"):
        list(groups(pieces, order, 7, 1000))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"j": torch.zeros(3, dtype=torch.int64)}, "j of a structure"),
        ({"species": torch.zeros(5, dtype=torch.int64)}, "atomic numbers from 1"),
        ({"forces": torch.zeros(4, 3)}, "forces of a structure"),
    ],
)
def test_structures_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(molecule(5, 4, 4.0), **change)


def test_sizes_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="cutoff of a network"):
        SchNet(cutoff=0)
    with pytest.raises(ValueError, match="features of a network"):
        PaiNN(features=0)
    with pytest.raises(ValueError, match="3 heads do not divide 16"):
        MolCT(16, heads=3)
