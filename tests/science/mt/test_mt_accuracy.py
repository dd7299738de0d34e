"""The accuracy that `Mesh2D.for_survey` documents, against the exact response of layered earths drawn at random."""

import math
import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from tutti.science.em.mt import MT2D, Data, Mesh2D
from tutti.science.em.mt.command import forward
from tutti.science.em.mt.mesh import skin_depth
from tutti.science.em.mt.response.layered import layered

FIGURES = {(10, 100): (0.64, 0.13), (10, 300): (1.0, 0.14), (1, 1000): (4.3, 0.79)}  # percent, degrees: at most


def errors(mesh, frequencies, resistivity, depths, sites=(0.0,)):
    """Largest errors of a layered earth with edges at its interfaces: apparent resistivity in percent, phase."""
    centres = torch.searchsorted(torch.tensor([*depths, math.inf]).double(), mesh.z)
    log_rho = torch.tensor(resistivity, dtype=torch.float64).log10()[centres]
    problem = MT2D(mesh, frequencies, sites, threads=1)
    d = problem(log_rho[:, None].expand(mesh.shape).contiguous()).view(problem.shape)
    rho, phase = layered(resistivity, [b - a for a, b in pairwise([0.0, *depths])], frequencies)
    worst = 100 * (10 ** d[..., 0] / rho[None, :, None] - 1).abs().max(), (d[..., 1] - phase[None, :, None]).abs().max()
    return tuple(float(x) for x in worst)


def narrow(mesh):
    """Its rows with two columns: layers are one-dimensional."""
    return Mesh2D([-1e4, 0.0, 1e4], mesh.z_edges)


def drawn(rng, rho_range):
    """Frequencies of 2 to 5 decades, and resistivities of 2 to 4 layers."""
    top, count = 10 ** rng.uniform(0, 4), rng.randrange(2, 6)
    low, high = (math.log10(rho) for rho in rho_range)
    return [top / 10**i for i in range(count)], [10 ** rng.uniform(low, high) for _ in range(rng.randrange(2, 5))]


@pytest.mark.parametrize("rho_range", FIGURES)
def test_layers_of_the_range_are_as_accurate_as_documented(rho_range):
    rng, worst = random.Random(0), []
    for _ in range(40):
        frequencies, resistivity = drawn(rng, rho_range)
        mesh = narrow(Mesh2D.for_survey(frequencies, [0.0], rho_range))
        depths = sorted(rng.sample(mesh.z_edges[3:-3], len(resistivity) - 1))
        worst.append(errors(mesh, frequencies, resistivity, depths))
    assert np.max(worst, 0)[0] < FIGURES[rho_range][0] and np.max(worst, 0)[1] < FIGURES[rho_range][1]
    assert np.median(worst, 0)[0] < 0.3


@pytest.mark.parametrize("rho_range", FIGURES)
def test_with_edges_at_interfaces_layers_are_within_half_a_percent(rho_range):
    rng = random.Random(1)
    for _ in range(30):
        frequencies, resistivity = drawn(rng, rho_range)
        smallest = skin_depth(rho_range[0], frequencies[0])
        reach = skin_depth(rho_range[1], frequencies[-1])
        depths = [smallest / 5 * (reach / smallest) ** rng.random()]
        for _ in resistivity[2:]:
            depths.append(depths[-1] * (1.2 + rng.random()))
        mesh = Mesh2D.for_survey(frequencies, [0.0], rho_range, depths=depths)
        depths = [depth for depth in depths if depth < mesh.z_edges[-1]]
        assert set(depths) <= set(mesh.z_edges)
        ratios = [max(b / a, a / b) for a, b in pairwise(mesh.dz.tolist())]
        assert max(ratios) < 1.35
        rho, phase = errors(narrow(mesh), frequencies, resistivity[: len(depths) + 1], depths)
        assert rho < 0.5 and phase < 0.3


@pytest.mark.parametrize("sites", [[-500.0, 0.0, 500.0], [-1000.0, -250.0, 0.0, 400.0, 1000.0], [0.0, 30e3]])
@pytest.mark.parametrize("resistivity", [(100, 100), (100, 10), (10, 300)])
def test_the_mesh_of_the_guide(sites, resistivity):
    """The rows are those of the guide; sites change columns, which layers do not see."""
    frequencies = [1.0, 10.0, 100.0]
    mesh = Mesh2D.for_survey(frequencies, sites, rho_range=(10, 300))
    depth = min(mesh.z_edges, key=lambda edge: abs(edge - 500))
    rho, phase = errors(mesh, frequencies, list(resistivity), [depth], sites)
    assert rho < FIGURES[10, 300][0] and phase < FIGURES[10, 300][1]


def test_the_mesh_of_a_config_has_edges_where_its_layers_and_bodies_begin_and_end(tmp_path, capsys):
    (tmp_path / "layer.toml").write_text(
        'survey = {frequencies = [1.0, 100.0], sites = [-500.0, 0.0, 500.0], modes = ["TM"]}\n'
        "mesh = {rho_range = [10.0, 100.0]}\n"
        "noise = {rho = 0.0, phase = 0.0}\n"
        "[model]\nlayers = [{top = 1200.0, bottom = 1e9, rho = 10.0}]\n"
    )
    forward(tmp_path / "layer.toml", str(tmp_path / "out"))
    data = Data.load(tmp_path / "out/data.npz")
    rho, _ = layered([100, 10], [1200], data.frequencies)
    assert (10 ** data.values[0, :, :, 0] / rho[:, None] - 1).abs().max() < 0.003
    assert "wanted" not in "".join(capsys.readouterr())


def test_sides_and_depths_of_bodies_are_met_and_neighbouring_cells_differ_little():
    sites = [-1500.0, -750.0, 0.0, 750.0, 1500.0]
    mesh = Mesh2D.for_survey([1.0, 100.0], sites, (10, 100), depths=[213.0, 700.0], sides=[-321.0, 410.0])
    assert {-321.0, 410.0} <= set(mesh.x_edges) and {213.0, 700.0} <= set(mesh.z_edges)
    assert max(max(b / a, a / b) for a, b in pairwise(mesh.dx.tolist())) < 1.5
    assert mesh.dx[(mesh.x > -1500) & (mesh.x < 1500)].max() <= 750 / 4 * 1.06


def test_interfaces_that_are_too_close_are_warned_of():
    with pytest.warns(UserWarning, match=r"depths: no edge at 500.1 m, 0.1 m from the one at 500 m: interfaces must"):
        mesh = Mesh2D.for_survey([1.0, 10.0], [0.0], (10, 100), depths=[500.0, 500.1])
    assert 500.0 in mesh.z_edges and 500.1 not in mesh.z_edges
    with pytest.warns(UserWarning, match="sides: no edge at 1 m, 1 m from the one at 0 m"):
        Mesh2D.for_survey([1.0, 10.0], [0.0, 500.0], (10, 100), sides=[0.0, 1.0])
