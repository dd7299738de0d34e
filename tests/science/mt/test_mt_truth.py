"""Sections with known responses: half-space, layers, COMMEMI 2D-0 and 2D-1, and the order of convergence."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from tutti.science.em.mt.mesh import Mesh2D, graded
from tutti.science.em.mt.response.forward import MT2D
from tutti.science.em.mt.response.layered import layered, log_resistivity
from tutti.science.em.mt.surveys.truth import commemi_2d0, commemi_2d0_tm, commemi_2d1

# x (km): TE apparent resistivity converged, TM exact apparent resistivity and phase
COMMEMI_2D0 = {
    -25: (7.970, 11.1630, 41.7439), -15: (4.686, 12.7983, 41.0259), -11: (2.925, 15.1145, 42.3615),
    -10.5: (None, 15.7020, 42.9230), -9.5: (None, 0.2801, 52.0968), -7: (1.534, 0.6457, 55.0827),
    0: (1.103, 1.0065, 49.9030), 7: (1.130, 0.9217, 48.4964), 9.5: (None, 0.7494, 47.0348),
    10.5: (None, 2.5494, 44.3188), 11: (1.445, None, None), 15: (1.702, 2.1482, 43.3005), 30: (1.996, 1.9883, 44.7633),
}  # fmt: skip
PUBLISHED_2D0 = {  # Zhdanov et al. (1997): means of TE and TM
    -25: (8.0, 11.21), -15: (4.7, 12.64), -7: (1.5, None), 7: (1.1, None), 15: (1.7, 2.11), 30: (2.0, 2.01),
}  # fmt: skip
SITES_2D1 = [0, 500, 1000, 2000, 4000]
COMMEMI_2D1 = {  # mode and frequency: apparent resistivities and phases, by Richardson extrapolation
    ("TE", 10): ([8.09, 14.16, 50.19, 95.98, 103.93], [76.05, 71.72, 65.96, 53.51, 46.07]),
    ("TE", 0.1): ([2.342, 3.315, 6.596, 16.459, 37.5], None),
    ("TM", 10): ([9.71, 44.86, 94.75, 98.44, 99.73], [71.42, 50.06, 44.63, 44.83, 45.06]),
    ("TM", 0.1): ([1.417, 41.27, 114.40, 115.87, 107.25], None),
}


def mesh_2d0(growth: float, first: float) -> Mesh2D:
    """The first row of the conductor is thin: its upper nodes would else give rock the volume of half of it."""
    x = graded([-10e3, 10e3], first, growth, before=3e5, after=3e5)
    z = graded([0], first / 2, growth, after=5e4)
    return Mesh2D(x, [edge * 5e4 / z[-1] for edge in z[:-1]] + [5e4, 5e4 + 1, 5e4 + 10])


def halved(mesh: Mesh2D) -> Mesh2D:
    """Each cell cut in two, both ways."""
    x, z = (sorted([*e, *[(a + b) / 2 for a, b in pairwise(e)]]) for e in (mesh.x_edges, mesh.z_edges))
    return Mesh2D(x, z)


def response(problem: MT2D, log_rho: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Apparent resistivities and phases (mode, frequency, site)."""
    d = problem(log_rho).view(problem.shape)
    return 10 ** d[..., 0], d[..., 1]


@pytest.mark.parametrize("solver", ["splu", "block"])
def test_half_space(solver):
    frequencies, sites = [100.0, 1.0, 0.01], [0.0, 700.0, 5000.0]
    mesh = Mesh2D.for_survey(frequencies, sites, (100, 100), growth=1.1, width=1500)
    rho, phase = response(MT2D(mesh, frequencies, sites, solver=solver), torch.full(mesh.shape, 2.0))
    torch.testing.assert_close(rho, torch.full_like(rho, 100), rtol=4e-3, atol=0)
    torch.testing.assert_close(phase, torch.full_like(phase, 45), rtol=0, atol=0.2)


def test_layers():
    """On a coarse mesh in x: nothing depends on it."""
    frequencies = [100.0, 10.0, 1.0, 0.1, 0.01]
    exact = layered([100, 10, 1000], [500, 1500], frequencies)
    x = graded([-500, 500], 500, 1.5, before=2e5, after=2e5)
    for growth, first, tolerance in ((1.15, 25, 4e-3), (1.07, 12.5, 1e-3), (1.035, 6.25, 3e-4)):
        mesh = Mesh2D(x, graded([0, 500, 2000], first, growth, after=2e5))
        layers = torch.where(mesh.z < 500, 100.0, torch.where(mesh.z < 2000, 10.0, 1000.0))
        problem = MT2D(mesh, frequencies, [10.0])
        curves = response(problem, log_resistivity(layers)[:, None].expand(mesh.shape))
        for mode in (0, 1):
            torch.testing.assert_close(curves[0][mode, :, 0], exact[0], rtol=tolerance, atol=0)
            torch.testing.assert_close(curves[1][mode, :, 0], exact[1], rtol=0, atol=25 * tolerance)


def test_commemi_2d0_exact_series():
    at = {x: row for x, row in COMMEMI_2D0.items() if row[1]}
    rho, phase = commemi_2d0_tm([1e3 * x for x in at])
    assert rho.tolist() == pytest.approx([row[1] for row in at.values()], abs=1.01e-4)
    assert phase.tolist() == pytest.approx([row[2] for row in at.values()], abs=1.01e-4)


def check_2d0(mesh: Mesh2D, te: float, tm: float, degrees: float) -> None:
    x = [1e3 * x for x in COMMEMI_2D0]
    rho, phase = response(MT2D(mesh, [1 / 300], x), commemi_2d0(mesh))
    exact = commemi_2d0_tm(x)
    torch.testing.assert_close(rho[1, 0], exact[0], rtol=tm, atol=0)
    torch.testing.assert_close(phase[1, 0], exact[1], rtol=0, atol=degrees)
    for i, (place, (converged, _, _)) in enumerate(COMMEMI_2D0.items()):
        assert converged is None or rho[0, 0, i].item() == pytest.approx(converged, rel=te)
        for published, computed in zip(PUBLISHED_2D0.get(place, ()), rho[:, 0, i].tolist(), strict=False):
            assert published is None or computed == pytest.approx(published, rel=0.035)


def test_commemi_2d0():
    check_2d0(mesh_2d0(1.15, 100), te=8e-3, tm=4e-3, degrees=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("growth, first, tm", [(1.07, 50, 1e-3), (1.035, 25, 2.5e-4)])
def test_commemi_2d0_on_finer_meshes(growth, first, tm):
    check_2d0(mesh_2d0(growth, first), te=2e-3, tm=tm, degrees=10 * tm)


def check_2d1(mesh: Mesh2D, te: float, tm: float, degrees: float) -> None:
    modes, frequencies = ("TE", "TM"), [10, 0.1]
    rho, phase = response(MT2D(mesh, frequencies, SITES_2D1, modes), commemi_2d1(mesh))
    for (mode, frequency), (rhos, phases) in COMMEMI_2D1.items():
        at = modes.index(mode), frequencies.index(frequency)
        assert rho[at].tolist() == pytest.approx(rhos, rel={"TE": te, "TM": tm}[mode]), (mode, frequency)
        assert phases is None or phase[at].tolist() == pytest.approx(phases, abs=degrees), (mode, frequency)


def mesh_2d1(growth: float, first: float) -> Mesh2D:
    x = graded([-500, 500], first, growth, before=1e5, after=1e5)
    return Mesh2D(x, graded([0, 250, 2250], first, growth, after=6e4))


def test_commemi_2d1():
    """TM at 0.1 Hz over the body, 1.4 ohm-m in 100, is the hardest."""
    check_2d1(mesh_2d1(1.1, 12.5), te=8e-3, tm=3e-2, degrees=0.15)


@pytest.mark.slow
def test_commemi_2d1_on_a_finer_mesh():
    check_2d1(mesh_2d1(1.04, 5), te=5e-3, tm=6e-3, degrees=0.06)


def test_errors_fall_with_the_square_of_the_cells():
    """TM against the exact series; TE by the differences of three meshes."""
    x = [-25e3, -15e3, 0.0, 15e3, 30e3]
    meshes = [mesh_2d0(1.5, 800)]
    for _ in (1, 2):
        meshes.append(halved(meshes[-1]))
    z = [MT2D(mesh, [1 / 300], x)(commemi_2d0(mesh)).view(2, len(x), 2)[..., 0] for mesh in meshes]
    te, tm = torch.stack(z, 1).unbind()
    errors = (tm - commemi_2d0_tm(x)[0].log10()).norm(dim=1)
    assert math.log2(errors[1] / errors[2]) == pytest.approx(2, abs=0.2)
    steps = te.diff(dim=0).norm(dim=1)
    assert math.log2(steps[0] / steps[1]) == pytest.approx(2, abs=0.3)
