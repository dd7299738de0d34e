"""Networks as potentials: forces, virials, replicas, units, kernels, together with classical terms."""

from __future__ import annotations

import pytest
import torch
from mol_structures import molecule

from tutti.science.mol.networks import (
    Ensemble,
    MolCT,
    Network,
    NetworkPotential,
    PaiNN,
    SchNet,
    calculator,
    compile_for_md,
    openmm_force,
    pack,
)
from tutti.science.mol.potential import Potential, Sum
from tutti.science.mol.system import System
from tutti.science.mol.terms import LennardJones
from tutti.science.mol.units import ELECTRONVOLT, MD, REDUCED, factor

KINDS = {"schnet": lambda: SchNet(16, 2, 10, 3.0), "painn": lambda: PaiNN(16, 2, 10, 3.0),
         "molct": lambda: MolCT(16, 1, 4, 1, 3.0)}  # fmt: skip
CELL = torch.tensor([[0.45, 0.0, 0.0], [0.1, 0.42, 0.0], [-0.05, 0.07, 0.4]], dtype=torch.float64)  # nm


def network_of(kind: str) -> Network:
    torch.manual_seed(0)
    network = KINDS[kind]().double()
    network.set_references({1: -13.6, 6: -1029.0, 7: -1485.0, 8: -2042.0}, 2.0)
    return network


def crystal(replicas: int = 1, pbc: bool = True) -> System:
    """In nm; atoms lie outside of the cell as well."""
    x = molecule(5, 4, 3.0, None, 3.3)
    draw = torch.Generator().manual_seed(5)
    positions = x.positions / 10 + 0.01 * torch.randn(replicas, 5, 3, generator=draw, dtype=torch.float64)
    if pbc:
        positions[:, 2] += CELL[0] - 2 * CELL[2]
    return System(positions, x.species, cell=CELL if pbc else None)


def differences(potential: Potential, system: System, step: float = 1e-5) -> tuple[torch.Tensor, torch.Tensor]:
    """-dU/dx of atom 2, -dU/d(strain), of replica 0, through `evaluate`."""

    def energy(x: torch.Tensor, cell: torch.Tensor | None) -> float:
        moved = System(x, system.species, cell=cell, pbc=system.pbc)
        return float(potential.evaluate(moved.positions, moved.cell, potential.neighbors(moved)).energy[0])

    forces, virial = torch.zeros(3, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64)
    for a in range(3):
        for b in range(3):
            ends = []
            for sign in (1, -1):
                strain = torch.eye(3, dtype=torch.float64)
                strain[a, b] += sign * step
                ends.append(energy(system.positions @ strain, None if system.cell is None else system.cell @ strain))
            virial[a, b] = -(ends[0] - ends[1]) / (2 * step)
        ends = []
        for sign in (1, -1):
            x = system.positions.clone()
            x[0, 2, a] += sign * step
            ends.append(energy(x, system.cell))
        forces[a] = -(ends[0] - ends[1]) / (2 * step)
    return forces, virial


@pytest.mark.parametrize("pbc", [True, False], ids=["crystal", "molecule"])
@pytest.mark.parametrize("kind", KINDS)
def test_forces_and_virials_are_derivatives(kind, pbc):
    system = crystal(pbc=pbc)
    potential = NetworkPotential(network_of(kind), system.species)
    evaluation = potential.evaluate(system.positions, system.cell, potential.neighbors(system, skin=0.05), virial=True)
    forces, virial = differences(potential, system)
    assert float(forces.norm()) > 1 and torch.allclose(evaluation.forces[0, 2], forces, rtol=1e-5, atol=1e-3)
    assert evaluation.virial is not None and torch.allclose(evaluation.virial[0], virial, rtol=1e-5, atol=1e-3)


@pytest.mark.starts
@pytest.mark.parametrize("pbc", [True, False], ids=["crystal", "molecule"])
@pytest.mark.parametrize("kind", ["schnet", "painn"])
def test_kernels_are_the_definition(kind, pbc):
    network, system = network_of(kind), crystal(3, pbc)
    plain = NetworkPotential(network, system.species)
    fast = NetworkPotential(compile_for_md(network, 1e-8, torch.float64), system.species)
    expected = plain.evaluate(system.positions, system.cell, plain.neighbors(system), virial=True)
    full = plain.neighbors(system, skin=0.05)
    full.half = False
    for neighbors in (fast.neighbors(system, skin=0.05), full):
        for virial in (True, False):
            evaluation = fast.evaluate(system.positions, system.cell, neighbors, virial)
            assert torch.allclose(evaluation.energy, expected.energy, rtol=0, atol=1e-4)
            assert float((evaluation.forces - expected.forces).norm()) < 1e-6 * float(expected.forces.norm())
            if evaluation.virial is not None and expected.virial is not None:
                assert torch.allclose(evaluation.virial, expected.virial, atol=1e-3)
    defined = fast.energy(system.positions, system.cell, full.pairs)
    assert torch.equal(defined.detach(), plain.energy(system.positions, system.cell, full.pairs).detach())


@pytest.mark.starts
def test_replicas_are_runs_of_their_own_also_when_the_list_changes():
    system, network = crystal(3), compile_for_md(network_of("schnet"))
    potential = NetworkPotential(network, system.species)
    neighbors = potential.neighbors(system, skin=0.02)
    for move in (0.0, 0.004, 0.2):
        x = system.positions + move * torch.randn(3, 5, 3, generator=torch.Generator().manual_seed(1)).double()
        neighbors.update(x, system.cell)
        evaluation = potential.evaluate(x, system.cell, neighbors, virial=True)
        for r in range(3):
            one = System(x[r], system.species, cell=CELL)
            single = potential.evaluate(one.positions, one.cell, potential.neighbors(one), virial=True)
            for name in ("energy", "forces", "virial"):
                assert torch.allclose(getattr(evaluation, name)[r], getattr(single, name)[0], rtol=1e-4, atol=1e-2), (
                    name
                )


def test_units_are_converted():
    system, network = crystal(), network_of("painn")
    network.units = "MD"  # the same numbers, in nm and kJ/mol
    x = molecule(5, 4, 3.0)
    energy, forces = network.energy_and_forces(pack([x]))
    same = System(x.positions, x.species)
    potential = NetworkPotential(network, x.species, MD)
    evaluation = potential.evaluate(same.positions, None, potential.neighbors(same))
    assert torch.allclose(evaluation.energy, energy) and torch.allclose(evaluation.forces[0], forces)
    network.units = "eV"
    converted = NetworkPotential(network, x.species, MD)
    assert converted.cutoff == pytest.approx(0.3)
    other = converted.evaluate(same.positions / 10, None, converted.neighbors(System(x.positions / 10, x.species)))
    assert torch.allclose(other.energy, energy * factor("energy", ELECTRONVOLT, MD))
    assert torch.allclose(other.forces[0], forces * factor("force", ELECTRONVOLT, MD))
    with pytest.raises(ValueError, match="reduced units have no size"):
        NetworkPotential(network, system.species, REDUCED)
    network.units = "hartree"
    with pytest.raises(ValueError, match="units of the network: one of MD"):
        NetworkPotential(network, system.species)


def test_networks_and_classical_terms_share_a_list_without_exclusions():
    system = crystal()
    network, lj = NetworkPotential(network_of("schnet"), system.species), LennardJones(0.2, 0.5, 0.4)
    both = Sum([network, lj])
    evaluation = both.evaluate(system.positions, system.cell, both.neighbors(system))
    one, other = [x.evaluate(system.positions, system.cell, x.neighbors(system)).forces for x in (network, lj)]
    assert torch.allclose(evaluation.forces, one + other) and set(evaluation.terms) >= {"network"}
    with pytest.raises(ValueError, match="exclude different pairs"):
        Sum([network, LennardJones(0.2, 0.5, 0.4, exclusions=[[0, 1]])])


def test_atoms_that_networks_cannot_have_are_refused():
    network = network_of("schnet")
    with pytest.raises(ValueError, match="not 0 of atom 1"):
        NetworkPotential(network, [1, 0])
    with pytest.raises(ValueError, match="no element 'Xx'"):
        NetworkPotential(network, ["O", "Xx"])
    system = crystal()
    potential = NetworkPotential(network, ["O", "H"])  # without a record of training all are taken
    with pytest.raises(ValueError, match="the potential has 2 atoms, the positions 5"):
        potential.evaluate(system.positions, system.cell, potential.neighbors(system))


@pytest.mark.starts
@pytest.mark.parametrize("use", ["network", "ensemble", "compiled", "compiled ensemble"])
def test_species_that_training_has_not_had_are_refused_everywhere(use):
    from ase import Atoms

    networks = [network_of("schnet"), network_of("schnet")]
    networks[0].seen_species[[1, 6, 8]] = True
    networks[1].seen_species[[1, 6, 7, 8]] = True
    network = Ensemble(networks) if "ensemble" in use else networks[0]
    network = compile_for_md(network) if "compiled" in use else network
    message = r"not trained on N, Cl, only on H, C, O: .* train it by `fit` on structures with N, Cl"
    NetworkPotential(network, ["O", "C", "H"])
    with pytest.raises(ValueError, match=message):
        NetworkPotential(network, ["O", "Cl", "N"])
    with pytest.raises(ValueError, match=message):
        Atoms("OClN", [[0, 0, 0], [0, 0, 2], [0, 2, 0]], calculator=calculator(network)).get_potential_energy()
    with pytest.raises(ValueError, match=message):
        openmm_force(network, ["O", "Cl", "N"])
