"""Meshes that are too coarse or too small for a model are warned of, before their responses are believed."""

import warnings

import pytest
import torch

from tutti.science.em.mt.mesh import Mesh2D, graded
from tutti.science.em.mt.response.forward import MT2D
from tutti.science.em.mt.response.layered import layered
from tutti.science.em.mt.suitability import shortcomings
from tutti.science.em.mt.surveys.synthetic import SETTINGS

X = [-2e4, -8e3, -2e3, -500.0, 500.0, 2e3, 8e3, 2e4]


def test_rows_too_thick_for_the_skin_depth_are_far_off_and_warned_of():
    mesh = Mesh2D(X, [0.0, 150, 350, 600, 900, 2000, 6000, 2e4])
    problem = MT2D(mesh, [1000.0, 1.0], [0.0], threads=1)
    model = torch.ones(mesh.shape)
    with pytest.warns(
        UserWarning, match=r"cells from 0 to 150 m .* 1000 Hz: .* 10 ohm-m .* 50.3 m.*for_survey"
    ) as caught:
        data = problem(model).view(problem.shape)
    assert abs(10 ** (data[0, 0, 0, 0] - 1) - 1) > 0.4, "what is warned of is wrong"
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        problem(model)  # once for a problem


def test_a_thick_row_in_the_depth_of_a_conductor_is_found():
    """Also where the first row is thin; exact responses say that it matters."""
    edges = [*graded([0, 1000], 20, 1.2), 1600.0, *(1600 + 600 * 1.3**i for i in range(1, 18))]
    mesh = Mesh2D(X, edges)
    model = torch.where(mesh.z < 1000, 3.0, 0.0)[:, None].expand(mesh.shape)
    problem = MT2D(mesh, [10.0], [0.0], threads=1)
    with pytest.warns(UserWarning, match="cells from 1000 to 1600 m"):
        apparent = 10 ** problem(model).view(problem.shape)[..., 0]
    assert (apparent / layered([1000, 1], [1000], [10.0])[0] - 1).abs().max() > 0.05


@pytest.mark.parametrize("growth", [1.15, 1.5])
def test_meshes_for_surveys_suit_every_model_of_their_range(growth):
    frequencies, sites = [1000.0, 1.0, 0.01], [0.0, 500.0, 1500.0]
    mesh = Mesh2D.for_survey(frequencies, sites, (1, 1000), growth=growth)
    generator = torch.Generator().manual_seed(0)
    for model in (torch.zeros(mesh.shape), *(3 * torch.rand(4, *mesh.shape, generator=generator))):
        assert not shortcomings(mesh, model.double(), frequencies, sites)


def test_sides_and_bottom_near_the_sites_are_warned_of_unless_the_earth_is_layered():
    mesh = Mesh2D(X, graded([0], 10, 1.2, after=1e4))
    model = torch.full(mesh.shape, 3.0, dtype=torch.float64)
    assert not shortcomings(mesh, model, [0.01], [0.0])
    model[5, 3] = 1.0
    side, bottom = shortcomings(mesh, model, [0.01], [0.0])
    assert "side of the mesh is 20000 m from the sites: 0.5 skin depths are needed" in side and "at 0.01 Hz" in side
    assert bottom.startswith("the mesh ends at 1")
    assert not shortcomings(mesh, model, [100.0], [0.0])


def test_columns_wider_than_sites_are_apart_are_warned_of():
    frequencies, sites = [100.0, 1.0], [-800.0, -400.0, 0.0, 400.0, 800.0]
    for width, good in ((None, True), (400.0, True), (500.0, False), (1000.0, False)):
        mesh = Mesh2D.for_survey(frequencies, sites, (10, 100), growth=1.5, width=width)
        model = torch.full(mesh.shape, 2.0, dtype=torch.float64)
        assert not shortcomings(mesh, model, frequencies, sites), "a layered earth needs no columns"
        model[3:6, mesh.nx // 2] = 1.0
        messages = shortcomings(mesh, model, frequencies, sites)
        assert bool(messages) != good
        assert good or f"is {width:.0f} m wide and holds a site: columns there may be as wide" in messages[0]


@pytest.mark.parametrize("name", SETTINGS)
def test_the_meshes_of_settings_suit_their_sections(name):
    setting = SETTINGS[name]()
    assert not any("column" in x for x in shortcomings(setting.mesh, setting.truths(1)[0], setting.frequencies,
                                                      setting.sites))  # fmt: skip
