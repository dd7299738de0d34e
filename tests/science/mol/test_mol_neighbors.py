"""Neighbour lists against brute force and ASE, and when they are built again."""

import copy
from collections import Counter

import pytest
import torch
from ase import Atoms
from ase.neighborlist import neighbor_list
from hypothesis import given, settings
from hypothesis import strategies as st
from mol_cases import CELLS, brute_force, listed, matrix, pairs_of

from tutti.science.mol.neighbors import NeighborList

PBC = [(True, True, True), (True, False, True), (False, True, False), (False, False, False)]


def cloud(atoms: int, cell: torch.Tensor, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    s = torch.rand(atoms, 3, dtype=torch.float64, generator=generator)
    return ((s - 0.5) * spread + 0.5) @ cell


def by_ase(x: torch.Tensor, cell: torch.Tensor, pbc: tuple[bool, bool, bool], cutoff: float) -> Counter:
    i, j, s = neighbor_list("ijS", Atoms(positions=x.numpy(), cell=cell.numpy(), pbc=pbc), cutoff)
    return Counter((int(a), int(b), tuple(map(int, m))) for a, b, m in zip(i, j, s, strict=True))


@pytest.mark.parametrize("pbc", PBC, ids=str)
@pytest.mark.parametrize("name", CELLS)
def test_pairs_are_those_of_brute_force(name, pbc):
    cell = matrix(name)
    x = cloud(12, cell)
    assert listed(pairs_of(x, cell, 2.5, pbc)) == brute_force(x, cell, pbc, 2.5)


@pytest.mark.parametrize("name", CELLS)
def test_pairs_are_those_of_ase(name):
    cell = matrix(name)
    x = cloud(15, cell, 1, spread=4.0)  # far outside the cell too
    pbc = (True, True, False)
    assert listed(pairs_of(x, cell, 2.2, pbc)) == by_ase(x, cell, pbc, 2.2)


def test_a_large_system_takes_the_same_pairs_by_cells():
    cell = torch.tensor([[14.0, 0, 0], [5, 13, 0], [-3, 4, 15]], dtype=torch.float64)
    x = cloud(600, cell)
    assert listed(pairs_of(x, cell, 2.0)) == by_ase(x, cell, (True,) * 3, 2.0)


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 9), st.floats(0.3, 4.0), st.sampled_from(PBC), st.floats(0.2, 30.0))
def test_any_cell_and_any_cloud(seed, atoms, cutoff, pbc, spread):
    generator = torch.Generator().manual_seed(seed)
    cell = torch.randn(3, 3, dtype=torch.float64, generator=generator) + 2 * torch.eye(3, dtype=torch.float64)
    if float(torch.linalg.det(cell).abs()) < 1:
        cell = cell + 3 * torch.eye(3, dtype=torch.float64)
    x = (torch.rand(atoms, 3, dtype=torch.float64, generator=generator) - 0.5) * spread
    assert listed(pairs_of(x, cell, cutoff, pbc)) == brute_force(x, cell, pbc, cutoff)


def test_without_a_cell():
    x = cloud(20, 5 * torch.eye(3, dtype=torch.float64))
    assert listed(pairs_of(x, None, 2.0)) == brute_force(x, None, (False,) * 3, 2.0)


def test_a_molecule_that_carries_a_cell_but_is_not_periodic_ignores_it():
    x = cloud(20, 5 * torch.eye(3, dtype=torch.float64))
    for cell in (torch.zeros(3, 3, dtype=torch.float64), 5 * torch.eye(3, dtype=torch.float64)):
        assert listed(pairs_of(x, cell, 2.0, pbc=False)) == listed(pairs_of(x, None, 2.0))


def test_an_atom_and_its_own_images():
    x = torch.zeros(1, 3, dtype=torch.float64)
    pairs = pairs_of(x, torch.eye(3, dtype=torch.float64), 1.01)
    assert sorted(pairs.shift.tolist()) == [[0, 0, 1], [0, 1, 0], [1, 0, 0]]
    full = pairs_of(x, torch.eye(3, dtype=torch.float64), 1.01, half=False)
    assert len(full) == 6 and listed(full) == listed(pairs)


def test_an_atom_without_neighbours_and_atoms_very_far_apart():
    x = torch.tensor([[0.0, 0, 0], [1e9, 0, 0], [1e9, 0.5, 0], [0, 0, -1e12]], dtype=torch.float64)
    assert listed(pairs_of(x, None, 1.0)) == {(1, 2, (0, 0, 0)): 1, (2, 1, (0, 0, 0)): 1}
    assert len(pairs_of(x[:1], None, 1.0)) == 0
    assert len(pairs_of(x, None, 0.0)) == 0


@pytest.mark.parametrize("name", ["triclinic", "anisotropic"])
def test_vectors_do_not_depend_on_the_image_that_an_atom_is_in(name):
    cell = matrix(name)
    x = cloud(10, cell)
    generator = torch.Generator().manual_seed(3)
    far = x + torch.randint(-1000, 1000, (10, 3), generator=generator).to(torch.float64) @ cell
    lengths = [
        pairs_of(y, cell, 2.5).vectors(y[None], cell[None]).norm(dim=-1).sort().values for y in (x, far)
    ]  # fmt: skip
    torch.testing.assert_close(lengths[0], lengths[1], rtol=0, atol=1e-10)


def test_a_list_is_built_again_when_a_pair_could_have_come_within_the_cutoff():
    cell = 10 * torch.eye(3, dtype=torch.float64)[None]
    x = torch.tensor([[[0.0, 0, 0], [1.45, 0, 0]]], dtype=torch.float64)
    neighbors = NeighborList(1.0, 0.4)
    assert neighbors.update(x, cell) == 1
    assert len(neighbors.pairs) == 0
    x[0, 0, 0] += 0.21
    assert neighbors.update(x, cell) == 0  # one atom alone cannot close the gap
    x[0, 1, 0] -= 0.2
    assert neighbors.update(x, cell) == 1
    assert len(neighbors.pairs) == 1
    assert neighbors.builds == 2


def test_motion_through_the_boundary_does_not_rebuild():
    """Positions are unwrapped: crossing a face is a small motion, and a jump by a lattice vector a large one."""
    cell = 4 * torch.eye(3, dtype=torch.float64)[None]
    x = torch.tensor([[[3.99, 0, 0], [0.3, 0, 0]]], dtype=torch.float64)
    neighbors = NeighborList(1.0, 0.4)
    neighbors.update(x, cell)
    x[0, 0, 0] += 0.05
    assert neighbors.update(x, cell) == 0
    torch.testing.assert_close(neighbors.pairs.vectors(x, cell).norm(), torch.tensor(0.26, dtype=torch.float64))
    x[0, 0, 0] -= 4
    assert neighbors.update(x, cell) == 1
    torch.testing.assert_close(neighbors.pairs.vectors(x, cell).norm(), torch.tensor(0.26, dtype=torch.float64))


@pytest.mark.parametrize("name", ["cubic", "triclinic", "smaller than the cutoff"])
def test_no_pair_is_missed_while_atoms_move_and_the_cell_shrinks(name):
    h0, x = matrix(name), cloud(10, matrix(name), 5, spread=3.0)
    neighbors = NeighborList(1.8, 0.3)
    generator = torch.Generator().manual_seed(1)
    for step in range(60):
        F = torch.eye(3, dtype=torch.float64) * (1 - 0.004 * step)
        F[0, 1] = 0.002 * step
        h = h0 @ F
        x = x + 0.02 * torch.randn(10, 3, dtype=torch.float64, generator=generator)
        y = (x @ F)[None]
        neighbors.update(y, h[None])
        assert listed(neighbors.pairs.within(1.8, y, h[None])) == brute_force(y[0], h, (True,) * 3, 1.8)
    assert 2 < neighbors.builds < 50


def test_a_gas_that_collapses_is_listed_whole():
    """Capacity follows what is found; there is none to overflow."""
    x = cloud(60, 30 * torch.eye(3, dtype=torch.float64))[None]
    neighbors = NeighborList(1.5, 0.1)
    counts = []
    for scale in (1.0, 0.3, 0.1, 0.02):
        neighbors.update(x * scale)
        counts.append(len(neighbors.pairs))
        assert listed(neighbors.pairs) == brute_force(x[0] * scale, None, (False,) * 3, 1.6)
    assert counts[-1] == 60 * 59 // 2


def test_replicas_have_lists_of_their_own():
    cell = torch.stack([matrix("cubic"), matrix("triclinic"), matrix("orthorhombic")])
    x = torch.stack([cloud(9, h, k) for k, h in enumerate(cell)])
    neighbors = NeighborList(2.5, 0.2)
    assert neighbors.update(x, cell) == 3
    pairs = neighbors.pairs.within(2.5, x, cell)
    for k in range(3):
        assert listed(pairs, k) == brute_force(x[k], cell[k], (True,) * 3, 2.5)
    x[1, 0] += 0.5
    assert neighbors.update(x, cell) == 1


def test_exclusions_leave_out_the_nearest_image_only():
    cell = torch.tensor([2.0, 9, 9], dtype=torch.float64).diag()
    x = torch.tensor([[0.0, 0, 0], [9.9, 0, 0], [5, 5, 5]], dtype=torch.float64)  # 0 and 1 are 0.1 apart
    pairs = pairs_of(x, cell, 2.0, exclusions=[[1, 0]])
    expected = brute_force(x, cell, (True,) * 3, 2.0)
    del expected[0, 1, (-5, 0, 0)], expected[1, 0, (5, 0, 0)]
    assert listed(pairs) == expected
    assert (0, 1, (-4, 0, 0)) in expected


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match="atom 1 of replica 0 is not finite"):
        NeighborList(1.0).update(torch.tensor([[[0.0, 0, 0], [torch.nan, 0, 0]]], dtype=torch.float64))
    with pytest.raises(ValueError, match="not independent"):
        NeighborList(1.0).update(torch.zeros(1, 2, 3, dtype=torch.float64), torch.ones(1, 3, 3, dtype=torch.float64))
    neighbors, x = NeighborList(1.0), torch.zeros(1, 2, 3, dtype=torch.float64)
    neighbors.update(x, torch.eye(3, dtype=torch.float64)[None])
    for broken in (0.0, torch.nan, torch.inf):
        with pytest.raises(ValueError, match=r"not finite|not independent"):
            neighbors.update(x, torch.diag(torch.tensor([1.0, 1.0, broken], dtype=torch.float64))[None])
    with pytest.raises(ValueError, match="there is no cell"):
        NeighborList(1.0, pbc=True).update(torch.zeros(1, 2, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="exclusion 0 joins atoms"):
        NeighborList(1.0, exclusions=[[0, 7]]).update(torch.zeros(1, 2, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="float64"):
        NeighborList(1.0).update(torch.zeros(1, 2, 3))
    with pytest.raises(ValueError, match="must be finite"):
        NeighborList(-1.0)
    with pytest.raises(ValueError, match="call update"):
        _ = NeighborList(1.0).handle


def test_a_list_follows_another_number_of_atoms_and_is_copied_without_its_pairs():
    neighbors = NeighborList(1.0)
    for atoms in (3, 5):
        neighbors.update(torch.zeros(1, atoms, 3, dtype=torch.float64))
        assert len(neighbors.pairs) == atoms * (atoms - 1) // 2
    assert copy.deepcopy(neighbors).cutoff == 1.0
