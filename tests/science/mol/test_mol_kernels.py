"""The C++ kernels against the definitions in torch: threads, replicas, and processors without AVX-512."""

import pytest
import torch
from mol_cases import matrix
from test_mol_ewald import spce
from test_mol_lennard_jones import OPTIONS

from tutti.science.mol import native
from tutti.science.mol.forcefield import Nonbonding, water_box
from tutti.science.mol.neighbors import NeighborList
from tutti.science.mol.potential import Evaluation, Potential, Sum
from tutti.science.mol.system import System
from tutti.science.mol.terms import PME, Coulomb, Ewald, LennardJones


def evaluate(system, term, virial=True) -> Evaluation:
    return term.evaluate(system.positions, system.cell, term.neighbors(system, skin=0.05), virial)


def by_autograd(system, term) -> Evaluation:
    """The default of all potentials, from the definition."""
    neighbors = term.neighbors(system, skin=0.05)
    forces, virial = torch.zeros_like(system.positions), torch.zeros(system.replicas, 3, 3, dtype=torch.float64)
    terms = Potential.accumulate(term, system.positions, system.cell, neighbors, forces, virial)
    return Evaluation(sum(terms.values()), forces, virial, terms)


def agree(evaluation: Evaluation, expected: Evaluation, tolerance: float = 1e-11) -> None:
    for name in ("energy", "forces", "virial"):
        one, other = getattr(evaluation, name), getattr(expected, name)
        assert float((one - other).norm()) <= tolerance * float(other.norm()), name


def terms(truncation: str, electrostatics: str) -> tuple[System, Sum]:
    """NIST's water with two types, in angstrom and kelvin."""
    system, inside = spce()
    types = (system.species == 1).to(torch.int64)
    options = {"switch": 7.0} if truncation == "switch" else {}
    lj = LennardJones([3.2, 1.0], [78.0, 3.0], 8.5, types, truncation, exclusions=inside, **options)
    k = system.units.coulomb
    coulomb = {
        "none": None,
        "reaction_field": Coulomb(system.charges, 9.0, "reaction_field", coulomb=k, exclusions=inside),
        "ewald": Ewald(system.charges, 9.0, 0.3, 4, coulomb=k, exclusions=inside),
        "pme": PME(system.charges, 9.0, 0.3, (12, 15, 16), coulomb=k, exclusions=inside),
    }[electrostatics]
    return system, Sum([lj] if coulomb is None else [lj, coulomb])


@pytest.mark.parametrize("electrostatics", ["none", "reaction_field", "ewald", "pme"])
@pytest.mark.parametrize("truncation", OPTIONS)
def test_kernels_are_the_definitions(truncation, electrostatics):
    system, term = terms(truncation, electrostatics)
    assert len(term.computed) == 1  # in one pass
    agree(evaluate(system, term), by_autograd(system, term))


def test_one_type_with_charges():
    system, inside = spce()
    term = Sum([LennardJones(3.0, 50.0, 8.0, exclusions=inside), Coulomb(system.charges, 9.0, exclusions=inside)])
    agree(evaluate(system, term), by_autograd(system, term))


@pytest.mark.parametrize("electrostatics", ["reaction_field", "pme"])
def test_threads_do_not_matter(electrostatics):
    options = {"method": electrostatics, "cutoff": 1.0, "tolerance": 1e-4}
    system, field = water_box(512, nonbonding=Nonbonding(**options))
    one = evaluate(system, field)
    try:
        torch.set_num_threads(2)
        two = evaluate(system, field)
        many = System(system.positions.repeat(3, 1, 1), charges=system.charges, cell=system.cell[0])
        replicas = evaluate(many, field)
    finally:
        torch.set_num_threads(1)
    agree(two, one)
    for k in range(3):
        agree(Evaluation(replicas.energy[k], replicas.forces[k], replicas.virial[k], {}),
              Evaluation(one.energy[0], one.forces[0], one.virial[0], {}))  # fmt: skip


def test_a_changed_cell_is_followed_without_a_new_list():
    """A barostat's small steps: pairs stay, images move with the cell."""
    system, term = terms("switch", "ewald")
    neighbors = term.neighbors(system, skin=1.0)
    F = torch.tensor([[1.01, 0.004, 0], [0, 0.995, 0], [0.003, 0, 1.002]], dtype=torch.float64)
    x, h = system.positions @ F, system.cell @ F
    assert neighbors.update(x, h) == 0
    evaluation = term.evaluate(x, h, neighbors, virial=True)
    fresh = System(x, charges=system.charges, cell=h)
    agree(evaluation, evaluate(fresh, term))


@pytest.mark.parametrize("wide", [True, False])
def test_a_list_that_does_not_suit_is_refused(wide):
    system, term = terms("cut", "reaction_field")
    with pytest.raises(ValueError, match=r"needs pairs within 9\.0" if wide else "excludes other pairs"):
        cutoff = 8.9 if wide else 9.0
        term.evaluate(system.positions, system.cell, NeighborList.of(system, cutoff))


@pytest.mark.parametrize("truncation", OPTIONS)
def test_processors_without_avx512(truncation, monkeypatch):
    plain = native.library(plain=True)
    monkeypatch.setattr(native, "library", lambda: plain)
    for electrostatics in ("none", "reaction_field", "ewald", "pme"):
        system, term = terms(truncation, electrostatics)
        agree(evaluate(system, term), by_autograd(system, term))
    h = matrix("triclinic")
    x = torch.rand(200, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) @ h * 2
    few = System(x, cell=h)
    lists = [NeighborList.of(few, 1.5).pairs]
    monkeypatch.undo()
    lists.append(NeighborList.of(few, 1.5).pairs)
    one, other = ({(*map(int, (i, j)), *s.tolist()) for i, j, s in zip(p.i, p.j, p.shift, strict=True)} for p in lists)
    assert one == other
