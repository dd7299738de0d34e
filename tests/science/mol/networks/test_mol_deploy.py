"""Networks in ASE, OpenMM and programs of torch.export."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from mol_structures import molecule

from tutti.science.mol.networks import Ensemble, MolCT, Network, PaiNN, SchNet, compile_for_md, pack
from tutti.science.mol.networks.deploy import arguments, calculator, export, openmm_force
from tutti.science.mol.units import ELECTRONVOLT, MD, factor

KINDS = {"schnet": lambda: SchNet(16, 2, 10, 4.0), "painn": lambda: PaiNN(16, 1, 10, 4.0),
         "molct": lambda: MolCT(16, 1, 4, 1, 4.0)}  # fmt: skip
CELL = [[5.0, 0.0, 0.0], [1.0, 4.5, 0.0], [-0.5, 0.7, 4.2]]


def network_of(kind: str = "schnet") -> Network:
    torch.manual_seed(0)
    return KINDS[kind]().double()


def atoms(cell: list[list[float]] | None = None):
    from ase import Atoms

    x = molecule(6, 1, 4.0, None, 3.5)
    return Atoms(numbers=x.species.numpy(), positions=x.positions.numpy(), cell=cell, pbc=cell is not None)


def test_ase_takes_energies_and_forces():
    network, x = network_of("painn"), atoms()
    energy, forces = network.energy_and_forces(pack([molecule(6, 1, 4.0, None, 3.5)]))
    x.calc = calculator(network)
    assert x.get_potential_energy() == pytest.approx(float(energy))
    assert np.allclose(x.get_forces(), forces.numpy())
    x.positions[0] += 0.2
    x.numbers[1] = 9
    changed = x.get_potential_energy()
    x.calc = calculator(network)
    assert changed == pytest.approx(x.get_potential_energy()) and changed != pytest.approx(float(energy))
    from ase.calculators.calculator import PropertyNotImplementedError

    with pytest.raises(PropertyNotImplementedError, match="three periodic axes"):
        x.get_stress()


def test_the_stress_is_the_derivative_of_the_energy():
    x = atoms(CELL)
    x.calc = calculator(network_of())
    from ase.calculators.fd import calculate_numerical_stress

    assert np.allclose(x.get_stress(), calculate_numerical_stress(x, eps=1e-5), atol=1e-6)
    assert float(np.abs(x.get_stress()).max()) > 1e-4


@pytest.mark.starts
def test_ensembles_and_kernels_are_calculators():
    x, network = atoms(CELL), network_of()
    evaluations = []
    for each in (network, Ensemble([network, network]), compile_for_md(network, 1e-8, torch.float64)):
        x.calc = calculator(each)
        evaluations.append((x.get_forces(), x.get_stress()))
    for forces, stress in evaluations[1:]:
        assert np.allclose(forces, evaluations[0][0], atol=1e-6) and np.allclose(stress, evaluations[0][1], atol=1e-6)


@pytest.mark.parametrize("periodic", [False, True])
def test_openmm_takes_energies_and_forces(periodic):
    openmm = pytest.importorskip("openmm")
    system, x = openmm.System(), atoms(CELL if periodic else None)
    for _ in range(len(x)):
        system.addParticle(12.0)
    if periodic:
        system.setDefaultPeriodicBoxVectors(*(np.array(CELL) / 10))
    network = network_of()
    system.addForce(openmm_force(network, x.numbers.tolist(), periodic))
    integrator = openmm.VerletIntegrator(0.0005)
    context = openmm.Context(system, integrator, openmm.Platform.getPlatformByName("Reference"))
    context.setPositions(x.positions / 10)
    state = context.getState(getEnergy=True, getForces=True)
    x.calc = calculator(network)
    assert state.getPotentialEnergy()._value == pytest.approx(
        x.get_potential_energy() * factor("energy", ELECTRONVOLT, MD), rel=1e-6)  # fmt: skip
    assert np.allclose(state.getForces(asNumpy=True)._value, x.get_forces() * factor("force", ELECTRONVOLT, MD),
                       rtol=1e-5, atol=1e-3)  # fmt: skip

    def total() -> float:
        now = context.getState(getEnergy=True)
        return (now.getPotentialEnergy() + now.getKineticEnergy())._value

    before = total()
    integrator.step(50)
    moved = abs(context.getState(getEnergy=True).getKineticEnergy()._value)
    assert moved > 0 and abs(total() - before) < 0.02 * moved


def test_openmm_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "openmm", None)
    with pytest.raises(ModuleNotFoundError, match=r"no package openmm; pip install 'openmm>=8\.4'"):
        openmm_force(network_of(), [1, 8])
    monkeypatch.setitem(sys.modules, "openmm", type(sys)("openmm"))
    sys.modules["openmm"].__version__ = "8.1"  # pyright: ignore
    with pytest.raises(ModuleNotFoundError, match=r"openmm 8\.1 has no PythonForce"):
        openmm_force(network_of(), [1, 8])


@pytest.mark.parametrize("kind", KINDS)
def test_exported_programs_take_batches_of_any_size(kind, tmp_path):
    network = network_of(kind)
    network.set_references({1: -13.6, 6: -1029.0}, 2.0)
    program = export(network, pack([molecule(6, 1, 4.0), molecule(4, 2, 4.0)]))
    assert all(p.requires_grad for p in network.parameters())
    path = tmp_path / "network.pt2"
    torch.export.save(program, path)
    again = torch.export.load(path).module()
    cell = torch.tensor(CELL, dtype=torch.float64)
    crystal = molecule(4, 3, 4.0, cell, 3.0)
    for batch in (
        pack([molecule(n, n, 4.0) for n in (5, 8, 3)]),
        pack([crystal]),
        pack([crystal, molecule(5, 5, 4.0)]),
    ):
        for one, other in zip(again(*arguments(batch)), network.energy_and_forces(batch), strict=True):
            assert torch.allclose(one, other, atol=1e-10)


def test_what_is_not_exported_is_refused():
    pair = pack([molecule(6, 1, 4.0), molecule(4, 2, 4.0)])
    with pytest.raises(ValueError, match="not Ensemble: export each of its members"):
        export(Ensemble([network_of(), network_of()]), pair)  # pyright: ignore
    with pytest.raises(ValueError, match="at least two structures"):
        export(network_of(), pack([molecule(6, 1, 4.0)]))
