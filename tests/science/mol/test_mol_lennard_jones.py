"""Lennard-Jones: NIST's reference values, truncations, tail corrections, mixtures."""

import math

import pytest
import torch
from mol_cases import CELLS, finite_difference_forces, finite_difference_virial, matrix, nist

from tutti.science.mol.system import System
from tutti.science.mol.terms import LennardJones

OPTIONS = {"cut": {}, "shift": {}, "force_shift": {}, "switch": {"switch": 1.4}}


def configuration() -> System:
    x, edges, _ = nist("lj_sample_config_periodic4.xyz")
    return System(x, cell=edges)


def evaluate(system, term, virial=True):
    return term.evaluate(system.positions, system.cell, term.neighbors(system), virial)


@pytest.mark.parametrize(
    ("cutoff", "energy", "virial", "tail"),
    [(3.0, -16.790321304626, -46.249, -0.54517), (4.0, -17.060, -47.869, -0.23008)],
)
def test_nist_configuration_4(cutoff, energy, virial, tail):
    """Tables of the NIST Standard Reference Simulation Website, with long-range correction."""
    evaluation = evaluate(configuration(), LennardJones(1.0, 1.0, cutoff, tail=True))
    assert float(evaluation.terms["lennard_jones"]) == pytest.approx(energy, abs=1e-10 if cutoff == 3 else 6e-4)
    assert float(evaluation.terms["tail"]) == pytest.approx(tail, rel=1e-5)
    pairs = evaluate(configuration(), LennardJones(1.0, 1.0, cutoff))
    assert float(pairs.virial.diagonal(dim1=1, dim2=2).sum()) == pytest.approx(virial, abs=6e-4)


def test_nist_configuration_4_with_linear_force_shift():
    evaluation = evaluate(configuration(), LennardJones(1.0, 1.0, 3.0, truncation="force_shift"))
    assert float(evaluation.energy) == pytest.approx(-15.001402, abs=1e-5)
    assert float(evaluation.virial.diagonal(dim1=1, dim2=2).sum()) == pytest.approx(-43.096, abs=6e-4)


def mixture(name: str, seed: int = 0) -> System:
    """Twelve atoms of three types, none too close, in cells that may be smaller than the cutoff."""
    h = matrix(name)
    generator = torch.Generator().manual_seed(seed)
    grid = torch.cartesian_prod(*[torch.arange(n, dtype=torch.float64) / n for n in (2, 2, 3)])
    x = (grid + 0.05 * torch.rand(12, 3, generator=generator, dtype=torch.float64)) @ h
    return System(x + 3.7 * h[0] - 11 * h[2], cell=h)


def mixed(system, truncation, **options):
    types = torch.arange(system.atoms) % 3
    return LennardJones([0.6, 0.5, 0.7], [1.0, 2.0, 0.5], 1.9, types, truncation, **OPTIONS[truncation], **options)


@pytest.mark.parametrize("truncation", OPTIONS)
@pytest.mark.parametrize("name", CELLS)
def test_forces_and_virial_are_derivatives_of_the_energy(name, truncation):
    system = mixture(name)
    term = mixed(system, truncation, exclusions=[[0, 1], [3, 7]])
    neighbors = term.neighbors(system, skin=0.1)
    evaluation = term.evaluate(system.positions, system.cell, neighbors, virial=True)
    torch.testing.assert_close(evaluation.energy, term.energy(system.positions, system.cell, neighbors.pairs))
    forces = finite_difference_forces(term, system.positions, system.cell, neighbors.pairs, [0, 5])
    scale = float(evaluation.forces.abs().max()) + 1
    torch.testing.assert_close(evaluation.forces[0, [0, 5]], forces, rtol=0, atol=2e-8 * scale)
    virial = finite_difference_virial(term, system.positions, system.cell, neighbors.pairs)
    torch.testing.assert_close(evaluation.virial[0], virial, rtol=0, atol=1e-7 * (1 + float(virial.abs().max())))
    torch.testing.assert_close(
        evaluation.forces.sum(1), torch.zeros(1, 3, dtype=torch.float64), rtol=0, atol=1e-9 * scale
    )


@pytest.mark.parametrize("truncation", OPTIONS)
def test_what_vanishes_at_the_cutoff(truncation):
    term = mixed(System(torch.zeros(3, 3)), truncation)
    r = torch.tensor([1.9 - 1e-9], dtype=torch.float64, requires_grad=True)
    u = term.truncated(r, term.sigma[0, 1], term.epsilon[0, 1])
    (slope,) = torch.autograd.grad(u.sum(), r)
    assert (abs(float(u.detach())) < 1e-8) == (truncation != "cut")
    assert (abs(float(slope)) < 1e-8) == (truncation in ("force_shift", "switch"))


def test_pairs_of_types_are_mixed_or_looked_up():
    mixing = LennardJones([1.0, 2.0], [1.0, 4.0], 5.0, types=[0, 1])
    assert mixing.sigma.tolist() == [[1, 1.5], [1.5, 2]] and mixing.epsilon.tolist() == [[1, 2], [2, 4]]
    table = LennardJones([[1.0, 1.2], [1.2, 1.0]], [[1.0, 0.1], [0.1, 1.0]], 5.0, types=[0, 1])
    system = System([[0.0, 0, 0], [1.3, 0, 0]])
    x6 = (1.2 / 1.3) ** 6
    assert float(evaluate(system, table, False).energy) == pytest.approx(0.4 * (x6**2 - x6), rel=1e-14)
    geometric = LennardJones([1.0, 4.0], [1.0, 4.0], 5.0, types=[0, 1], mixing="geometric")
    assert geometric.sigma[0, 1] == 2


@pytest.mark.parametrize("options", [{}, {"truncation": "switch", "switch": 2.0}], ids=str)
def test_tail_corrections_are_the_integrals_of_what_is_missing(options):
    """Energy against the formula for one species; virial by the strain of the full potential: for a uniform gas
    -3 V dU/dV of an energy U(V) = C / V is 3 U, whether or not it is truncated."""
    rc, atoms, V = 2.5, 12, 7.0**3
    cell = 7 * torch.eye(3, dtype=torch.float64)[None]
    term = LennardJones(1.1, 0.7, rc, tail=True, **options)
    x3, rho = (1.1 / rc) ** 3, atoms / V
    energy = 8 / 3 * math.pi * atoms * rho * 0.7 * 1.1**3 * (x3**3 / 3 - x3)
    pressure = 16 / 3 * math.pi * rho**2 * 0.7 * 1.1**3 * (2 / 3 * x3**3 - x3)
    corrections = float(term.tail_energy(atoms, cell)), float(term.tail_virial(atoms, cell))
    if not options:
        assert corrections == pytest.approx((energy, 3 * V * pressure), rel=1e-12)
    else:  # no jump at the cutoff: the virial is the strain derivative of the energy
        assert corrections[1] == pytest.approx(3 * corrections[0], rel=1e-9)
        assert energy * 2 < corrections[0] < energy
    system = System(mixture("cubic").positions / 6 * 7, cell=7.0)
    whole = evaluate(system, term)
    without = evaluate(system, LennardJones(1.1, 0.7, rc, **options))
    assert float(whole.energy - without.energy) == pytest.approx(corrections[0], rel=1e-12)
    torch.testing.assert_close(
        (whole.virial - without.virial)[0], corrections[1] / 3 * torch.eye(3, dtype=torch.float64), atol=1e-12, rtol=0
    )


def test_full_lists_count_pairs_once():
    system = mixture("triclinic")
    term = mixed(system, "shift")
    once = term.energy(system.positions, system.cell, term.neighbors(system).pairs)
    term.half = False
    torch.testing.assert_close(term.energy(system.positions, system.cell, term.neighbors(system).pairs), once)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"truncation": "smooth"}, "truncation 'smooth' is not known"),
        ({"truncation": "switch"}, "go together"),
        ({"truncation": "switch", "switch": 3.0}, "must lie below the cutoff"),
        ({"truncation": "shift", "tail": True}, "tail corrections are for"),
        ({"cutoff": -1.0}, "must be positive"),
        ({"sigma": [1.0, -1.0], "types": [0, 1]}, "not negative"),
        ({"sigma": [1.0, 1.0], "types": [0, 2]}, "types are"),
        ({"sigma": [[1.0, 2.0], [1.0, 1.0]], "types": [0, 1]}, "symmetric"),
        ({"mixing": "arithmetic"}, "mixing 'arithmetic' is not known"),
    ],
)
def test_errors_name_what_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=message):
        LennardJones(**{"sigma": 1.0, "epsilon": 1.0, "cutoff": 2.5} | arguments)


def test_types_of_another_system_are_refused():
    term = LennardJones([1.0, 1.0], 1.0, 2.5, types=[0, 1])
    with pytest.raises(ValueError, match="types for 2 atoms, but there are 3"):
        evaluate(System(torch.arange(9.0).reshape(3, 3)), term)
    with pytest.raises(ValueError, match="need a periodic cell"):
        evaluate(System(torch.arange(9.0).reshape(3, 3)), LennardJones(1.0, 1.0, 2.5, tail=True))
