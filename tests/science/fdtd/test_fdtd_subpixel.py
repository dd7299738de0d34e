"""Means of materials at surfaces within cells."""

from __future__ import annotations

import pytest
import torch

from tutti.science.em.cad import box, fill
from tutti.science.em.fdtd import Grid
from tutti.science.em.fdtd.media.subpixel import conductor, permittivity
from tutti.science.em.fdtd.observation.farfield3d import surface3d

GRID = Grid((6, 5, 4), 0.1)


def below(height: float) -> torch.Tensor:
    """A quarter of a cell each, of a solid in all of the grid below a height in cells."""
    edges = [torch.arange(4 * n + 1) / 4 for n in GRID.shape]
    return fill(box((-1, -1, -1), (7, 6, height)), *edges)


def test_tangential_and_normal_fields_at_a_plane():
    """The surface is at 2.25: around Ex at 2 lie 3/4 of a cell of the solid, around Ez at 2.5 a quarter."""
    eps = permittivity(GRID, below(2.25), 4.0)
    assert eps["Ex"][3, 2].tolist() == pytest.approx([4, 4, 0.75 * 4 + 0.25, 1, 1])
    assert eps["Ez"][3, 2, :4].tolist() == pytest.approx([4, 4, 1 / (0.25 / 4 + 0.75), 1])
    assert all(tuple(x.shape) == GRID.nodes for x in eps.values())
    assert bool((permittivity(GRID, torch.zeros(24, 20, 16), 4.0)["Ey"] == 1).all())


def test_edges_and_faces_outside_of_a_conductor():
    materials = conductor(GRID, below(2.25))
    assert materials["pec"]["Ex"][3, 2].tolist() == [True, True, True, False, False]
    assert materials["pec"]["Ez"][3, 2, :4].tolist() == [True, True, False, False]
    assert float(materials["eps_r"]["Ez"][3, 2, 2]) == pytest.approx(1 / 0.75)
    assert materials["mu_r"]["Hx"][3, 2, 1:4].tolist() == pytest.approx([0.25, 0.75, 1])


def test_errors_say_what_is_needed():
    with pytest.raises(ValueError, match="even number of parts"):
        permittivity(GRID, torch.zeros(18, 15, 12), 4.0)
    with pytest.raises(ValueError, match="each of three axes"):
        surface3d([(1, 2), (1, 2)], torch.ones(1))
