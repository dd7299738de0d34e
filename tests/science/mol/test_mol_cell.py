"""Volumes, widths, reduction and nearest images of cells."""

import itertools
import math

import pytest
import torch
from mol_cases import CELLS, matrix

from tutti.science.mol import cell as cells

PBC = [(True, True, True), (True, False, True), (False, True, False)]


@pytest.mark.parametrize("name", CELLS)
def test_widths_times_faces_are_the_volume(name):
    h = matrix(name)
    for k in range(3):
        face = torch.linalg.cross(h[(k + 1) % 3], h[(k + 2) % 3]).norm()
        torch.testing.assert_close(cells.widths(h)[k] * face, cells.volume(h))


@pytest.mark.parametrize("name", CELLS)
def test_reduced_cells_span_the_same_lattice(name):
    h = matrix(name)
    reduced, steps = cells.reduce(h)
    torch.testing.assert_close(reduced, steps.to(h.dtype) @ h)
    assert int(torch.linalg.det(steps.to(h.dtype)).round()) in (1, -1)
    for a, b in itertools.permutations(range(3), 2):
        assert float((reduced[a] @ reduced[b]).abs()) <= float(reduced[b] @ reduced[b]) / 2 + 1e-9


@pytest.mark.parametrize("pbc", PBC, ids=str)
@pytest.mark.parametrize("name", CELLS)
def test_the_minimum_image_is_the_shortest_of_all(name, pbc):
    h = matrix(name)
    d = (torch.rand(50, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 0.5) * 3 @ h
    near = cells.minimum_image(d[None], h[None], pbc)[0]
    reduced, _ = cells.reduce(h, pbc)
    axes = [range(-6, 7) if flag else range(1) for flag in pbc]
    shifts = torch.tensor(list(itertools.product(*axes)), dtype=torch.float64) @ reduced
    shortest = (near[:, None] + shifts).norm(dim=-1).amin(-1)
    torch.testing.assert_close(near.norm(dim=-1), shortest)
    moved = cells.fractional(near - d, cells.complete(h, pbc))
    torch.testing.assert_close(moved, moved.round(), rtol=0, atol=1e-9)
    assert not moved[:, [k for k in range(3) if not pbc[k]]].abs().gt(1e-9).any()


def test_wrapped_positions_lie_in_the_cell_along_periodic_axes():
    h = matrix("triclinic")
    x = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 20
    s = cells.fractional(cells.wrap(x, h), h)
    assert ((s > -1e-12) & (s < 1 + 1e-12)).all()
    torch.testing.assert_close(cells.wrap(x, h, (False, False, False)), x)


def test_a_cutoff_beyond_half_the_cell_is_refused_where_one_image_is_assumed():
    h = matrix("orthorhombic")[None]
    cells.require_minimum_image(h, (True, True, True), 2.5, "a term")
    cells.require_minimum_image(h, (False, True, True), 3.5, "a term")
    with pytest.raises(ValueError, match=r"a term needs a cutoff of at most half the least width of the cell, 2\.5"):
        cells.require_minimum_image(h, (True, True, True), 2.6, "a term")


def test_cells_from_lengths_and_angles():
    h = cells.from_parameters((3.0, 4.0, 5.0), (70.0, 80.0, 100.0))
    torch.testing.assert_close(h.norm(dim=-1), torch.tensor([3.0, 4, 5], dtype=torch.float64))
    for (i, j), degrees in (((1, 2), 70.0), ((0, 2), 80.0), ((0, 1), 100.0)):
        cosine = float(h[i] @ h[j] / (h[i].norm() * h[j].norm()))
        assert cosine == pytest.approx(math.cos(math.radians(degrees)))
    assert h[0, 1] == h[0, 2] == h[1, 2] == 0
    torch.testing.assert_close(
        cells.from_parameters((1, 2, 3), (90, 90, 90)), torch.diag(torch.tensor([1.0, 2, 3]).double())
    )
    with pytest.raises(ValueError, match="no cell with angles"):
        cells.from_parameters((1, 1, 1), (30, 30, 100))
