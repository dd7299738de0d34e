"""Tabulated filters, and the C++ kernels that compute with them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mol_structures import molecule, structure

from tutti.science.mol.networks import MolCT, Network, PaiNN, SchNet, compile_for_md, pack
from tutti.science.mol.networks.fast.tables import tabulate

KINDS = {"schnet": lambda: SchNet(24, 3, 12, 4.0), "painn": lambda: PaiNN(24, 3, 12, 4.0)}
CELL = torch.tensor([[4.0, 0.0, 0.0], [1.0, 3.5, 0.0], [-0.5, 0.7, 3.2]], dtype=torch.float64)


@pytest.fixture(params=KINDS)
def network(request) -> Network:
    torch.manual_seed(0)
    network = KINDS[request.param]().double()
    with torch.no_grad():
        for p in network.parameters():
            p += 0.1 * torch.randn_like(p)
    network.set_references({1: -13.6, 6: -1029.0, 7: -1485.0, 8: -2042.0}, 2.0)
    return network


def batch():
    """Molecules, an atom alone, and a crystal whose cell is shorter than the cutoff."""
    return pack([molecule(9, 1, 4.0), molecule(1, 2, 4.0), molecule(4, 3, 4.0, CELL, 2.5), molecule(12, 4, 4.0)])


def test_tables_are_filters_and_end_at_the_cutoff(network):
    tables = tabulate(network, 1e-6)
    d = torch.rand(500, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 4
    exact = torch.stack(network.filters(d))
    assert tables.error <= 1e-6 and float((tables(d) - exact).detach().abs().max()) < 1e-6 * float(exact.detach().max())
    assert float(tables(torch.tensor([4.0, 9.0], dtype=torch.float64)).abs().max()) == 0
    fine, coarse = tabulate(network, 1e-9), tabulate(network, 1e-2)
    assert coarse.data.shape[1] == 513 < fine.data.shape[1]


@pytest.mark.starts
@pytest.mark.parametrize(("dtype", "digits"), [(torch.float64, 1e-7), (torch.float32, 2e-5)])
def test_energies_and_forces_are_those_of_the_network(network, dtype, digits):
    x = batch()
    energy, forces = network.energy_and_forces(x)
    fast = compile_for_md(network, 1e-8 if dtype == torch.float64 else 1e-5, dtype)
    table_energy, table_forces = fast.energy_and_forces(x)
    assert float((table_energy - energy).abs().max()) < 10 * digits
    assert float((table_forces - forces).norm() / forces.norm()) < digits
    assert float(table_forces[9].abs().max()) == 0


@pytest.mark.starts
def test_forces_are_exact_gradients_of_the_tabulated_energy(network):
    """Dynamics conserves the splines' energy, whatever the tolerance."""
    fast = compile_for_md(network, 1e-2, torch.float64)
    x = molecule(6, 4, 4.0, CELL, 3.0)
    forces, step = fast.energy_and_forces(pack([x]))[1], 1e-4
    for atom, axis in ((0, 0), (3, 1), (5, 2)):
        moved = []
        for sign in (-1, 1):
            positions = x.positions.clone()
            positions[atom, axis] += sign * step
            moved.append(structure(x.species, positions, 4.0, CELL))
        low, high = fast.energy_and_forces(pack(moved))[0].tolist()
        assert -(high - low) / (2 * step) == pytest.approx(float(forces[atom, axis]), rel=1e-4, abs=1e-5)


@pytest.mark.starts
def test_virials_are_derivatives_by_the_strain(network):
    fast = compile_for_md(network, 1e-8, torch.float64)
    x = molecule(4, 3, 4.0, CELL, 2.5)
    virial = fast.evaluate(pack([molecule(5, 1, 4.0), x]), virial=True)[2]
    assert virial is not None and virial.shape == (2, 3, 3)
    for a, b in ((0, 0), (1, 2)):
        energies = []
        for sign in (-1, 1):
            strain = torch.eye(3, dtype=torch.float64)
            strain[a, b] += sign * 1e-5
            energies.append(float(network.energy(pack([replace(x, positions=x.positions @ strain, cell=CELL @ strain)])
                                                 ).detach()))  # fmt: skip
        assert float(virial[1, a, b]) == pytest.approx(-(energies[1] - energies[0]) / 2e-5, rel=1e-4, abs=1e-5)


@pytest.mark.starts
def test_half_lists_other_orders_and_more_threads_change_nothing(network):
    fast, x = compile_for_md(network, 1e-5, torch.float64), batch()
    energy, forces = fast.energy_and_forces(x)
    flat = pack([molecule(9, 1, 4.0), molecule(12, 4, 4.0)])
    one_way = flat.i < flat.j
    halved = replace(flat, i=flat.i[one_way], j=flat.j[one_way])
    for a, b in zip(fast.evaluate(halved, half=True)[:2], fast.evaluate(flat)[:2], strict=True):
        assert torch.allclose(a, b, atol=1e-9)
    order = torch.randperm(len(x.i), generator=torch.Generator().manual_seed(1))
    mixed = replace(x, i=x.i[order], j=x.j[order], shifts=x.shifts[order])
    many = pack([molecule(12, 4, 4.0)] * 30)  # several blocks; and below, one large one
    large = replace(many, molecule=torch.zeros_like(many.molecule), count=1)
    one = [fast.evaluate(y, virial=True) for y in (many, large)]
    assert float(one[1][0]) == pytest.approx(float(one[0][0].sum()))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        three = [fast.evaluate(y, virial=True) for y in (many, large)]
    finally:
        torch.set_num_threads(before)
    for outputs, expected in [(fast.evaluate(mixed)[:2], (energy, forces)), *zip(three, one, strict=True)]:
        assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(outputs, expected, strict=True) if b is not None)


def test_what_has_no_tables_is_refused():
    with pytest.raises(ValueError, match="no kernel for MolCT"):
        compile_for_md(MolCT(8, heads=2))
    with pytest.raises(ValueError, match=r"above the tolerance of 1.0e-30"):
        compile_for_md(SchNet(8, 1, 8), 1e-30)
    with pytest.raises(ValueError, match="dtype of compile_for_md"):
        compile_for_md(SchNet(8, 1, 8), dtype=torch.bfloat16)
