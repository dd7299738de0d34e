"""Particle mesh Ewald against Ewald's sum, for all shapes of cells and tolerances."""

import pytest
import torch
from mol_cases import finite_difference_forces, finite_difference_virial, matrix
from test_mol_ewald import salt, spce

from tutti.science.mol.system import System
from tutti.science.mol.terms import PME, Ewald
from tutti.science.mol.terms.pme import good_size, splines
from tutti.science.mol.units import KELVIN_2010


def relative(actual, expected):
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("order", [4, 5, 6, 8])
def test_splines_are_a_partition_of_one_with_mean_zero(order):
    w = torch.rand(20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    m = splines(w, order)
    torch.testing.assert_close(m.sum(-1), torch.ones_like(w))
    x = w[:, None] + torch.arange(order)
    torch.testing.assert_close((m * x).sum(-1), torch.full_like(w, order / 2))


@pytest.mark.parametrize("order", [5, 6])
@pytest.mark.parametrize("tolerance", [1e-3, 1e-4, 1e-5, 1e-6])
def test_forces_of_water_are_within_the_tolerance(tolerance, order):
    system, inside = spce()
    exact = Ewald.accurate(system.charges, system.cell, 9.0, 1e-10, KELVIN_2010.coulomb, inside)
    term = PME.accurate(system.charges, system.cell, 9.0, tolerance, order, KELVIN_2010.coulomb, inside)
    expected = exact.evaluate(system.positions, system.cell, exact.neighbors(system), virial=True)
    evaluation = term.evaluate(system.positions, system.cell, term.neighbors(system), virial=True)
    assert relative(evaluation.forces, expected.forces) < tolerance
    assert relative(evaluation.energy, expected.energy) < tolerance
    assert relative(evaluation.virial, expected.virial) < 10 * tolerance


@pytest.mark.parametrize("order", [5, 6, 8])
@pytest.mark.parametrize("name", ["orthorhombic", "triclinic", "left-handed", "anisotropic"])
def test_any_cell(name, order):
    system = salt(matrix(name), atoms=10, charged=True)
    exact = Ewald.accurate(system.charges, system.cell, 2.5, 1e-11, 1.0, exclusions=[[0, 1]])
    term = PME.accurate(system.charges, system.cell, 2.5, 1e-5, order, 1.0, exclusions=[[0, 1]])
    expected = exact.evaluate(system.positions, system.cell, exact.neighbors(system), virial=True)
    evaluation = term.evaluate(system.positions, system.cell, term.neighbors(system), virial=True)
    for name in ("energy", "forces", "virial"):
        assert relative(getattr(evaluation, name), getattr(expected, name)) < 2e-5, name


@pytest.mark.parametrize("grid", [(9, 8, 10), (11, 9, 7)])
def test_kernel_is_the_definition_and_its_derivatives(grid):
    """Coarse grids too: the forces are derivatives of the energy of the grid."""
    system = salt(matrix("triclinic"), charged=True)
    term = PME(system.charges, 2.0, 1.0, grid, 5, 1.0, exclusions=[[0, 1]])
    neighbors = term.neighbors(system)
    evaluation = term.evaluate(system.positions, system.cell, neighbors, virial=True)
    torch.testing.assert_close(evaluation.energy, term.energy(system.positions, system.cell, neighbors.pairs))
    forces = finite_difference_forces(term, system.positions, system.cell, neighbors.pairs, [0, 3])
    torch.testing.assert_close(evaluation.forces[0, [0, 3]], forces, rtol=1e-7, atol=1e-7)
    virial = finite_difference_virial(term, system.positions, system.cell, neighbors.pairs)
    torch.testing.assert_close(evaluation.virial[0], virial, rtol=1e-7, atol=1e-7)


def test_replicas_with_cells_of_their_own():
    both = [salt(matrix(name), seed=k) for k, name in enumerate(("cubic", "triclinic"))]
    system = System(
        torch.cat([x.positions for x in both]), charges=both[0].charges, cell=torch.cat([x.cell for x in both])
    )
    term = PME(system.charges, 2.0, 1.3, (16, 15, 18), coulomb=1.0)
    evaluation = term.evaluate(system.positions, system.cell, term.neighbors(system), virial=True)
    for k in range(2):
        one = System(system.positions[k], charges=system.charges, cell=system.cell[k])
        expected = term.evaluate(one.positions, one.cell, term.neighbors(one), virial=True)
        for name in ("energy", "forces", "virial"):
            torch.testing.assert_close(getattr(evaluation, name)[k], getattr(expected, name)[0])


def test_grid_sizes_have_small_factors():
    assert [good_size(n) for n in (1, 11, 13, 33, 64, 121)] == [1, 12, 14, 35, 64, 125]
    with pytest.raises(ValueError, match="at least the order"):
        PME([1.0], 1.0, 1.0, (4, 8, 8))
    with pytest.raises(ValueError, match="the order 3 of splines"):
        PME([1.0], 1.0, 1.0, (8, 8, 8), order=3)
