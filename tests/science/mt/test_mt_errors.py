"""Bad input: the message names the thing and what would work."""

from __future__ import annotations

import math

import pytest
import torch

from tutti.science.em.mt.mesh import Mesh2D, graded
from tutti.science.em.mt.response.forward import MT2D
from tutti.science.em.mt.response.layered import layered, log_resistivity
from tutti.science.em.mt.share import Share
from tutti.science.em.mt.surveys.truth import commemi_2d0

MESH = Mesh2D([0, 100, 200, 400], [0, 10, 30])


@pytest.mark.parametrize(
    "work, message",
    [
        (lambda: Mesh2D([0, 100, 100], [0, 1, 2]), r"x_edges must be finite and increase: x_edges\[1\] = 100"),
        (lambda: Mesh2D([0, 1, math.nan], [0, 1, 2]), "x_edges must be finite and increase"),
        (lambda: Mesh2D([0, 1, 2], [5, 6, 7]), "z_edges must begin at the surface, z = 0 m; got 5"),
        (lambda: Mesh2D([0, 1, 2], [0, 1]), "z_edges must have at least 3 edges"),
        (lambda: Mesh2D.for_survey([1.0, 0.0], [0.0], (1, 10)), r"frequencies are in Hz and must be positive.*\[0.0\]"),
        (lambda: Mesh2D.for_survey([1.0], [], (1, 10)), "sites are positions in metres, at least one"),
        (lambda: Mesh2D.for_survey([1.0], [0.0], (10, 1)), r"rho_range must be \(lowest, highest\)"),
        (lambda: Mesh2D.for_survey([1.0], [0.0], (1, 10), growth=1), "growth must be over 1"),
        (lambda: MT2D(MESH, [], [0.0]), "must be positive and finite; got none"),
        (lambda: MT2D(MESH, [-1.0], [0.0]), r"must be positive and finite; got \[-1.0\]"),
        (
            lambda: MT2D(MESH, [1.0], [0.0, 401.0]),
            r"sites \[401.0\] \(m\) are outside of the mesh, which spans 0 to 400",
        ),
        (lambda: MT2D(MESH, [1.0], [math.nan]), "outside of the mesh"),
        (lambda: MT2D(MESH, [1.0], []), "sites are x positions in metres; got none"),
        (lambda: MT2D(MESH, [1.0], [0.0], ("TE", "TE")), "each once"),
        (lambda: MT2D(MESH, [1.0], [0.0], "XY"), r"modes must be one or more of \('TE', 'TM', 'tipper'\)"),
        (lambda: MT2D(MESH, [1.0], [0.0], solver="cholmod"), r"solver must be one of \('splu', 'block', 'block32'\)"),
        (lambda: MT2D(MESH, [1.0], [0.0], outputs="rho"), r"outputs must be one of \('apparent', 'impedance'\)"),
        (
            lambda: MT2D(MESH, [1.0], [0.0])(torch.zeros(3, 2)),
            r"shape \(2, 3\) .* or \(6,\); got \(3, 2\)",
        ),
        (lambda: MT2D(MESH, [1.0], [0.0])(torch.tensor([[1.0, math.inf, 1]] * 2)), "finite: 2 cells are not"),
        (lambda: MT2D(MESH, [1.0], [0.0])(torch.full((2, 3), 100.0)), "log_rho must be log10 of ohm-m; got 100"),
        (lambda: MT2D(MESH, [1.0], [0.0]).jacobian(torch.full((2, 3), -11.0)), "must be log10 of ohm-m; got -11"),
        (lambda: MT2D(MESH, [1.0], [0.0]).linearize(torch.full((2, 3), 100.0)), "must be log10 of ohm-m; got 100"),
        (lambda: log_resistivity([10, 0, -1]), "2 of 3 values are not, as 0; for air use a large value"),
        (lambda: log_resistivity([math.nan]), "must be positive and finite"),
        (lambda: layered([1, 2], [1, 2], [1.0]), "n layers need n values of log_rho and n - 1 of thickness"),
        (lambda: layered([1, 2], [-1], [1.0]), "thickness positive"),
        (lambda: commemi_2d0(MESH), "interface at -10000 m, x_edges has none there: the nearest is 0"),
    ],
)
def test_messages(work, message):
    with pytest.raises(ValueError, match=message):
        work()


def test_meshes_for_surveys_follow_the_grid_rule():
    mesh = Mesh2D.for_survey([100.0, 0.01], [0.0, 1000.0, 3000.0], (1, 100))
    skin = 503.29 * torch.tensor([(1 / 100) ** 0.5, (100 / 0.01) ** 0.5])
    assert mesh.dz[0].item() == pytest.approx(skin[0].item() / 16, rel=1e-4)
    assert (mesh.dz[1:] / mesh.dz[:-1]).max() <= 1.1001 and (mesh.dx[1:] / mesh.dx[:-1]).max() <= 1.1501
    assert mesh.z_edges[-1] >= 1.5 * skin[1] and mesh.x_edges[-1] >= 3000 + 1.5 * skin[1]
    samtex = Mesh2D.geometric(750e3)
    assert samtex.shape == (64, 100) and samtex.z_edges[-1] == pytest.approx(84.03e3, rel=1e-3)
    assert samtex.dz[[0, -1]].tolist() == pytest.approx([2, 10.7e3], rel=1e-2)
    edges = graded([0, 250, 2250], 20, 1.1, after=1e4)
    assert {0, 250, 2250} <= set(edges) and edges[-1] >= 12250 and edges == sorted(edges)


def test_shares_cover_all_work_once():
    share = Share(5, 7)
    share.count, share.apart = 8, 4
    seen = torch.zeros(5, 7)
    for rank in range(8):
        f, s = share.own(rank)
        seen[f, s] += 1
    assert seen.eq(1).all()
