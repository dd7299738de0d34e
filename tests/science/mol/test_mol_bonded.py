"""Bonds, angles, torsions and 1-4 pairs: values by hand, derivatives, across faces of the cell."""

import math

import pytest
import torch
from mol_cases import finite_difference_forces, finite_difference_virial, matrix

from tutti.science.mol.neighbors import NeighborList
from tutti.science.mol.potential import Potential, Sum
from tutti.science.mol.system import System
from tutti.science.mol.terms import (
    PME,
    Coulomb,
    HarmonicAngles,
    HarmonicBonds,
    HarmonicImpropers,
    LennardJones,
    PeriodicTorsions,
    RyckaertBellemansTorsions,
    SpecialPairs,
    UreyBradley,
    neighbors_by_bonds,
)
from tutti.science.mol.terms.bonded import dihedral

CHAINS = [[0, 1, 2, 3], [1, 2, 3, 4], [4, 3, 2, 1], [2, 3, 4, 5]]
TERMS = {
    "bonds": HarmonicBonds([[0, 1], [1, 2], [4, 3]], [1.0, 1.1, 0.9], [10.0, 20.0, 30.0]),
    "urey_bradley": UreyBradley([[0, 2], [3, 5]], 1.5, 3.0),
    "angles": HarmonicAngles([[0, 1, 2], [3, 2, 1], [3, 4, 5]], [1.9, 2.0, math.pi], 15.0),
    "torsions": PeriodicTorsions(CHAINS, [1, 2, 3, 6], [0.0, math.pi, 0.3, -1.0], [1.0, 2.0, 0.5, 4.0]),
    "impropers": HarmonicImpropers(CHAINS, [3.1, -3.1, 0.5, 0.0], 2.0),
    "ryckaert_bellemans": RyckaertBellemansTorsions(CHAINS, [[9.28, 12.16, -13.12, -3.06, 26.24, -31.5]] * 4),
    "special_pairs": SpecialPairs([[0, 3], [1, 4]], [1.1, 1.2], [0.3, 0.4], [0.1, -0.2], coulomb=2.0),
}


def chain(cell: torch.Tensor | None) -> System:
    x = torch.tensor(
        [[0.0, 0, 0], [1, 0.2, 0], [1.4, 1.1, 0.3], [2.3, 1.2, 0.9], [2.7, 2.1, 0.6], [3.4, 2.2, 1.5]],
        dtype=torch.float64,
    )
    return System(x, cell=cell)


@pytest.mark.parametrize("name", TERMS)
def test_forces_and_virial_are_derivatives_of_the_energy(name):
    system, term = chain(matrix("triclinic")), TERMS[name]
    neighbors = term.neighbors(system)
    evaluation = term.evaluate(system.positions, system.cell, neighbors, virial=True)
    torch.testing.assert_close(evaluation.energy, term.energy(system.positions, system.cell, neighbors.pairs))
    torch.testing.assert_close(sum(evaluation.terms.values()), evaluation.energy)
    forces = finite_difference_forces(term, system.positions, system.cell, neighbors.pairs, range(6))
    torch.testing.assert_close(evaluation.forces[0], forces, rtol=1e-7, atol=1e-7)
    virial = finite_difference_virial(term, system.positions, system.cell, neighbors.pairs)
    torch.testing.assert_close(evaluation.virial[0], virial, rtol=1e-7, atol=1e-7)
    x = system.positions[0]
    torque = torch.linalg.cross(x, evaluation.forces[0]).sum(0)
    torch.testing.assert_close(torque, torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", TERMS)
def test_molecules_may_lie_across_faces(name):
    """Atoms folded into the cell, one by one, as files have them; and far outside."""
    term, whole = TERMS[name], chain(matrix("triclinic"))
    alone = chain(None)
    expected = term.evaluate(alone.positions, None, term.neighbors(alone))
    shifts = torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, -5, 1], [3, 3, 3], [0, 1, 0], [-100, 0, 7]], dtype=torch.float64)
    for x in (whole.positions, whole.wrapped(), whole.positions + shifts @ whole.cell):
        evaluation = term.evaluate(x, whole.cell, term.neighbors(whole))
        torch.testing.assert_close(evaluation.energy, expected.energy, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(evaluation.forces, expected.forces, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("degrees", [0.0, 60.0, 90.0, 135.0, 180.0, -30.0, -120.0])
def test_dihedrals_follow_iupac(degrees):
    phi = math.radians(degrees)
    x = torch.tensor([[1.0, 0, 0], [0, 0, 0], [0, 0, 1], [math.cos(phi), math.sin(phi), 1]], dtype=torch.float64)
    d = dihedral(x[1] - x[0], x[2] - x[1], x[3] - x[2])
    assert float(torch.cos(d - phi)) == pytest.approx(1)
    torsion = PeriodicTorsions([[0, 1, 2, 3]], 3, 0.2, 1.5)
    system = System(x)
    energy = float(torsion.evaluate(system.positions, None, torsion.neighbors(system)).energy)
    assert energy == pytest.approx(1.5 * (1 + math.cos(3 * phi - 0.2)))


def test_straight_and_planar_geometries_have_finite_forces():
    system = System([[0.0, 0, 0], [1, 0, 0], [2, 0, 0], [2, 1, 0]])
    for term in (
        HarmonicAngles([[0, 1, 2]], math.pi, 3.0),
        PeriodicTorsions([[0, 1, 3, 2]], 2, 0.0, 1.0),
    ):
        evaluation = term.evaluate(system.positions, None, term.neighbors(system), virial=True)
        assert evaluation.forces.isfinite().all()


def test_exclusions_by_bonds_take_the_shortest_way():
    ring = [[0, 1], [1, 2], [2, 3], [3, 0], [3, 4], [4, 5]]
    one, two, three = neighbors_by_bonds(ring)
    assert one.tolist() == [[0, 1], [0, 3], [1, 2], [2, 3], [3, 4], [4, 5]]
    assert two.tolist() == [[0, 2], [0, 4], [1, 3], [2, 4], [3, 5]]
    assert three.tolist() == [[0, 5], [1, 4], [2, 5]]
    assert len(neighbors_by_bonds([])[0]) == 0


def test_terms_that_share_a_list_must_exclude_the_same_pairs():
    with pytest.raises(ValueError, match="exclude different pairs"):
        Sum([LennardJones(1.0, 1.0, 2.0, exclusions=[[0, 1]]), LennardJones(1.0, 1.0, 1.0)])
    both = Sum([LennardJones(1.0, 1.0, 2.0), LennardJones(1.0, 1.0, 1.0), *TERMS.values()])
    assert both.cutoff == 2.0
    system = chain(matrix("cubic"))
    evaluation = both.evaluate(system.positions, system.cell, both.neighbors(system), virial=True)
    parts = [t.evaluate(system.positions, system.cell, NeighborList.of(system, t.cutoff), True) for t in both.terms]
    torch.testing.assert_close(evaluation.energy, sum(p.energy for p in parts))
    torch.testing.assert_close(evaluation.forces, sum(p.forces for p in parts))
    torch.testing.assert_close(evaluation.virial, sum(p.virial for p in parts))


class Directed(Potential):
    """As networks are: each pair is wanted in both directions."""

    name, cutoff, half = "directed", 1.5, False

    def energy(self, positions, cell, pairs):
        assert not pairs.half
        return pairs.sum(torch.relu(1.5 - pairs.vectors(positions, cell).norm(dim=-1)) ** 2, len(positions))


def test_terms_of_pairs_and_of_directed_edges_share_a_list():
    system, lj = chain(matrix("triclinic")), LennardJones(1.0, 1.0, 2.0)
    both = Sum([lj, Directed()])
    evaluation = both.evaluate(system.positions, system.cell, both.neighbors(system), True)
    parts = [t.evaluate(system.positions, system.cell, t.neighbors(system), True) for t in (lj, Directed())]
    for name in ("energy", "forces", "virial"):
        torch.testing.assert_close(getattr(evaluation, name), sum(getattr(p, name) for p in parts))
    pairs = both.neighbors(system).pairs
    torch.testing.assert_close(both.energy(system.positions, system.cell, pairs), evaluation.energy)
    once = Directed()
    once.half = True
    with pytest.raises(ValueError, match="once and some twice"):
        Sum([once, Directed()])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HarmonicBonds([[0, 0]], 1.0, 1.0), "bonds 0 names an atom twice"),
        (lambda: HarmonicBonds([[0, -1]], 1.0, 1.0), "bonds 0 joins atoms"),
        (
            lambda: HarmonicBonds([[0, 1], [1, 2]], 1.0, [1.0, -2.0]),
            "bonds: stiffness must not be negative, but entry 1",
        ),
        (lambda: HarmonicAngles([[0, 1, 2]], 1.0, -1.0), "angles: stiffness must not be negative, but entry 0 is -1.0"),
        (lambda: HarmonicBonds([[0, 1]], 1.0, math.nan), "bonds: stiffness must be finite, but entry 0 is nan"),
        (lambda: PeriodicTorsions([[0, 1, 2, 3]], 1, 0.0, math.inf), "torsions: stiffness must be finite, but entry 0"),
        (lambda: Coulomb([1.0, math.nan], 1.0), "charges must be finite, but entry 1 is nan"),
        (lambda: PME([math.nan], 1.0, 3.0, (8, 8, 8)), "charges must be finite, but entry 0 is nan"),
        (lambda: HarmonicAngles([[0, 1, 2]], [1.0, 2.0], 1.0), "angles: angle has shape"),
        (lambda: PeriodicTorsions([[0, 1, 2, 3]], 1.5, 0.0, 1.0), "the periodicity is a whole number"),
        (lambda: RyckaertBellemansTorsions([[0, 1, 2, 3]], [[1.0]]), "coefficients are six numbers"),
    ],
)
def test_errors_name_what_is_wrong(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_torsions_may_have_a_negative_stiffness():
    x = torch.tensor([[1.0, 0.1, 0], [0, 0, 0], [0, 0, 1.0], [-1.0, 0, 1.0]], dtype=torch.float64)[None]
    one, other = (PeriodicTorsions([[0, 1, 2, 3]], 2, 0.0, k) for k in (1.5, -1.5))
    energies = [t.evaluate(x, None, t.neighbors(System(x))).energy for t in (one, other)]
    assert float(energies[0]) > 0 and torch.equal(energies[0], -energies[1])


def test_atoms_that_do_not_exist_are_named():
    term = HarmonicBonds([[0, 1], [1, 9]], 1.0, 1.0)
    system = chain(None)
    with pytest.raises(ValueError, match=r"bonds 1 joins atoms \[1, 9\], but there are 6 atoms"):
        term.evaluate(system.positions, None, term.neighbors(system))
