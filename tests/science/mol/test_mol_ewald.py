"""Electrostatics: NIST's SPC/E water term by term, Madelung constants, triclinic cells, forces and virials."""

import math

import pytest
import torch
from mol_cases import CELLS, finite_difference_forces, finite_difference_virial, matrix, nist

from tutti.science.mol.system import System
from tutti.science.mol.terms import Coulomb, Ewald, LennardJones
from tutti.science.mol.units import KELVIN_2010


def spce() -> tuple[System, torch.Tensor]:
    """NIST's configuration 1 in angstrom and kelvin, and the pairs within molecules."""
    x, edges, elements = nist("spce_sample_config_periodic1.xyz")
    charges = [-0.84760 if e == "O" else 0.42380 for e in elements]
    system = System(x, elements, charges=charges, cell=edges, units=KELVIN_2010)
    o = torch.arange(0, 300, 3)
    inside = torch.cat([torch.stack([o + a, o + b], 1) for a, b in ((0, 1), (0, 2), (1, 2))])
    return system, inside


def test_nist_spce_configuration_1():
    system, inside = spce()
    options = {"coulomb": KELVIN_2010.coulomb, "exclusions": inside}
    ewald = Ewald(system.charges, 10.0, 5.6 / 20, kmax=5, kmax_squared=27, **options)
    terms = ewald.evaluate(system.positions, system.cell, ewald.neighbors(system)).terms
    expected = {"real": -5.58889e5, "fourier": 6.27009e3, "self": -2.84469e6, "intra": 2.80999e6}
    for name, value in expected.items():
        assert float(terms[f"ewald_{name}"]) == pytest.approx(value, rel=2e-6), name
    types = (system.species == 1).to(torch.int64)
    lj = LennardJones([3.16555789, 1.0], [78.19743111, 0.0], 10.0, types, tail=True, exclusions=inside)
    pairs = lj.evaluate(system.positions, system.cell, lj.neighbors(system)).terms
    assert float(pairs["lennard_jones"]) == pytest.approx(9.95387e4, rel=2e-6)
    assert float(pairs["tail"]) == pytest.approx(-823.715, rel=2e-6)
    total = sum(map(float, (*terms.values(), *pairs.values())))
    assert total == pytest.approx(-4.88604e5, rel=2e-6)


def salt(cell: torch.Tensor, atoms: int = 8, seed: int = 0, charged: bool = False) -> System:
    generator = torch.Generator().manual_seed(seed)
    s = torch.rand(atoms, 3, dtype=torch.float64, generator=generator)
    q = torch.randn(atoms, dtype=torch.float64, generator=generator)
    return System((s * 3 - 1) @ cell, charges=q if charged else q - q.mean(), cell=cell)


@pytest.mark.parametrize("charged", [False, True])
@pytest.mark.parametrize("name", CELLS)
def test_the_sum_does_not_depend_on_how_it_is_split(name, charged):
    """In any cell, also one that is smaller than the cutoff, skewed, or charged (with its background)."""
    system = salt(matrix(name), charged=charged)
    energies, virials = [], []
    for cutoff in (2.0, 3.0):
        term = Ewald.accurate(system.charges, system.cell, cutoff, 1e-12, 1.0, exclusions=[[0, 1], [4, 2]])
        evaluation = term.evaluate(system.positions, system.cell, term.neighbors(system), virial=True)
        energies.append(evaluation.energy)
        virials.append(evaluation.virial)
        trace = evaluation.virial.diagonal(dim1=1, dim2=2).sum(-1)  # U is homogeneous in lengths, of degree -1
        torch.testing.assert_close(trace, evaluation.energy, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(*energies, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(*virials, rtol=1e-8, atol=1e-8)


def test_the_same_lattice_in_other_vectors_has_the_same_energy():
    system = salt(matrix("triclinic"))
    h = torch.tensor([[1.0, 0, 0], [2, 1, 0], [-1, 1, 1]], dtype=torch.float64) @ matrix("triclinic")
    energies = []
    for cell in (matrix("triclinic"), h):
        other = System(system.positions, charges=system.charges, cell=cell)
        term = Ewald.accurate(other.charges, other.cell, 2.5, 1e-11, 1.0)
        energies.append(term.evaluate(other.positions, other.cell, term.neighbors(other)).energy)
    torch.testing.assert_close(*energies, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("cell", "fractions", "charges", "constant"),
    [
        ([[0.0, 1, 1], [1, 0, 1], [1, 1, 0]], [[0.0, 0, 0], [0.5, 0.5, 0.5]], [1.0, -1], 1.7475645946331821),  # NaCl
        ([[2.0, 0, 0], [0, 2, 0], [0, 0, 2]], [[0.0, 0, 0], [0.5, 0.5, 0.5]], [1.0, -1], 1.7626747730709883),  # CsCl
        ([[0.0, 1, 1], [1, 0, 1], [1, 1, 0]], [[0.0, 0, 0], [0.25, 0.25, 0.25]], [1.0, -1], 1.6380550533887893),  # ZnS
    ],
    ids=["NaCl", "CsCl", "ZnS"],
)
def test_madelung_constants(cell, fractions, charges, constant):
    """By the distance of nearest neighbours; the first and last in primitive cells of rhombohedral shape."""
    h = torch.tensor(cell, dtype=torch.float64)
    x = torch.tensor(fractions, dtype=torch.float64) @ h
    d0 = min(float((x[1] - x[0] + s).norm()) for s in torch.cartesian_prod(*[torch.arange(-2.0, 2)] * 3).double() @ h)
    system = System(x, charges=charges, cell=h)
    term = Ewald.accurate(system.charges, system.cell, 3.0, 1e-13, 1.0)
    energy = term.evaluate(system.positions, system.cell, term.neighbors(system)).energy
    assert -float(energy) * d0 == pytest.approx(constant, rel=1e-10)


@pytest.mark.parametrize("name", ["triclinic", "anisotropic", "smaller than the cutoff"])
def test_forces_and_virial_are_derivatives_of_the_energy(name):
    system = salt(matrix(name), charged=True)
    term = Ewald(system.charges, 2.5, 1.2, [8, 5, 6], coulomb=1.0, exclusions=[[0, 1], [2, 5]])
    neighbors = term.neighbors(system)
    evaluation = term.evaluate(system.positions, system.cell, neighbors, virial=True)
    torch.testing.assert_close(evaluation.energy, term.energy(system.positions, system.cell, neighbors.pairs))
    forces = finite_difference_forces(term, system.positions, system.cell, neighbors.pairs, [0, 3])
    torch.testing.assert_close(evaluation.forces[0, [0, 3]], forces, rtol=1e-7, atol=1e-7)
    virial = finite_difference_virial(term, system.positions, system.cell, neighbors.pairs)
    torch.testing.assert_close(evaluation.virial[0], virial, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("method", ["cut", "shift", "reaction_field"])
def test_coulomb_pairs(method):
    system = salt(matrix("triclinic"), atoms=12)
    term = Coulomb(system.charges, 2.5, method, coulomb=1.0, exclusions=[[0, 1]])
    neighbors = term.neighbors(system, skin=0.2)
    evaluation = term.evaluate(system.positions, system.cell, neighbors, virial=True)
    torch.testing.assert_close(evaluation.energy, term.energy(system.positions, system.cell, neighbors.pairs))
    forces = finite_difference_forces(term, system.positions, system.cell, neighbors.pairs, [0, 3])
    torch.testing.assert_close(evaluation.forces[0, [0, 3]], forces, rtol=1e-7, atol=1e-7)
    end = 1 / 2.5 + term.quadratic * 2.5**2 - term.constant
    assert end == pytest.approx(0.0 if method != "cut" else 0.4, abs=1e-12)


def test_a_reaction_field_of_a_conductor_ends_smoothly():
    term = Coulomb([1.0, -1.0], 2.0, "reaction_field", dielectric=math.inf, coulomb=1.0)
    assert (term.quadratic, term.constant) == pytest.approx((1 / 16, 0.75))
    assert -1 / 4 + 2 * term.quadratic * 2 == pytest.approx(0)  # du/dr at the cutoff


def test_errors_name_what_is_wrong():
    system = System(torch.arange(6.0).reshape(2, 3), charges=[1.0, -1.0])
    term = Ewald(system.charges, 1.0, 1.0, 3)
    with pytest.raises(ValueError, match="periodic along all three vectors"):
        term.evaluate(system.positions, system.cell, term.neighbors(system))
    with pytest.raises(ValueError, match="must be positive"):
        Ewald(system.charges, 1.0, -1.0, 3)
    with pytest.raises(ValueError, match="method 'direct' is not known"):
        Coulomb(system.charges, 1.0, "direct")
    periodic = System(system.positions, cell=9.0)
    wrong = Ewald([1.0, 0, -1], 1.0, 1.0, 3)
    with pytest.raises(ValueError, match="charges for 3 atoms, but there are 2"):
        wrong.evaluate(periodic.positions, periodic.cell, wrong.neighbors(periodic))
