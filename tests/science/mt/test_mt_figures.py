"""Pictures: where things are drawn, and between which limits."""

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from tutti.science.em.mt import command, figures
from tutti.science.em.mt.config import MTConfig
from tutti.science.em.mt.mesh import Mesh2D
from tutti.science.em.mt.surveys.data import Data

MESH = Mesh2D([-2000, -1000, 0, 1000, 2000], [0, 500, 1000, 4000])


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved."""
    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: saved.append(figure))
    return saved


def data(rho=2.0, sites=(1000.0, -1000.0, 3000.0), frequencies=(100.0, 1.0, 10.0)) -> Data:
    values = torch.empty(1, len(frequencies), len(sites), 2, dtype=torch.float64)
    values[..., 0], values[..., 1] = rho, 45.0
    values[0, 1, 1, 0] += 0.01
    return Data(frequencies, sites, ("TE",), values, torch.ones_like(values))


def test_pseudosections_have_axes_in_km_and_hz_and_a_least_range_of_colours(drawn):
    observed = data()
    figures.pseudosections("data.png", observed, observed.values)
    rho, computed, _, phase = drawn[0].axes[:4]
    assert (rho.get_title(), computed.get_title()) == ("TE, observed", "TE, computed")
    assert rho.get_xlim() == (-2.0, 4.0) and rho.get_yscale() == "log"
    assert rho.get_ylim() == pytest.approx((10**-0.5, 10**2.5))
    image = rho.collections[0]
    assert image.get_clim() == pytest.approx((1.905, 2.105)) and phase.collections[0].get_clim() == (42.5, 47.5)
    assert image.get_array()[0, 0] == pytest.approx(2.01), "the lowest frequency is below, the smallest x at the left"
    assert {image.colorbar.ax.get_ylabel(), phase.collections[0].colorbar.ax.get_ylabel()} == {
        r"log10 $\rho_a$ (ohm-m)", "phase (degrees)"}  # fmt: skip


def test_fits_draw_tippers_on_axes_of_their_own(drawn):
    values = torch.tensor([2.0, 0.1], dtype=torch.float64)[:, None, None, None].expand(2, 1, 1, 2)
    both = Data((1.0,), (0.0,), ("TE", "tipper"), values, torch.full_like(values, 0.01))
    figures.fits("fits.png", both, values)
    rho, phase, real, imaginary = drawn[0].axes
    assert [axes.get_ylabel() for axes in (rho, phase, real, imaginary)] == [
        r"log10 $\rho_a$ (ohm-m)", "phase (degrees)", "Re Hz/Hy", "Im Hz/Hy"]  # fmt: skip
    for axes, name in ((rho, "TE"), (real, "tipper")):
        assert [text.get_text() for text in axes.get_legend().get_texts()] == [name]
    assert rho.get_ylim()[0] > 1 > real.get_ylim()[1]


def test_one_site_and_one_frequency_are_a_picture(drawn):
    values = torch.ones(1, 1, 1, 2, dtype=torch.float64)
    figures.pseudosections("data.png", Data((1.0,), (0.0,), ("TM",), values, values), name="computed")
    assert drawn[0].axes[0].get_xlim() == (-0.5, 0.5)


def test_sections_state_their_vertical_exaggeration(drawn):
    figures.sections("model.png", MESH, {"model": torch.ones(MESH.shape)}, area=(-2000.0, 2000.0, 1000.0))
    axes = drawn[0].axes[0]
    box = axes.get_window_extent()
    wanted = (box.height / 1.0) / (box.width / 4.0)
    assert axes.get_xlabel() == f"x (km); vertical exaggeration {wanted:.2g}"
    assert axes.collections[0].get_clim() == pytest.approx((0.9, 1.1))


@pytest.mark.parametrize(("model", "depth"), [
    ("[[model.layers]]\ntop = 2500.0\nbottom = 1e9\nrho = 10.0\n", 3750.0),
    ("[[model.bodies]]\nx = [0.0, 9.0]\nz = [1.0, 5.0]\nrho = 10.0\n", 2000.0),
    ("[figure]\ndepth = 700.0\n", 700.0),
    ("", 2000.0),
    ("[[model.layers]]\ntop = 3900.0\nbottom = 1e9\nrho = 10.0\n", 4000.0),
])  # fmt: skip
def test_sections_reach_below_the_model_or_as_deep_as_the_data_see(tmp_path, model, depth):
    (tmp_path / "a.toml").write_text(model)
    area = command._area(MTConfig.load(tmp_path / "a.toml"), MESH, data())
    assert area == (-1500.0, 2000.0, depth)


def test_sections_are_at_most_half_as_deep_below_the_model_as_wide(tmp_path):
    deep = Mesh2D(MESH.x_edges, [0.0, 1e3, 4e4])
    (tmp_path / "a.toml").write_text("[[model.layers]]\ntop = 10e3\nbottom = 1e9\nrho = 10.0\n")
    (tmp_path / "b.toml").write_text("")
    depths = [command._area(MTConfig.load(tmp_path / f"{x}.toml"), deep, data(4.0))[2] for x in "ab"]
    assert depths == [12e3, 2e3]


def test_data_see_a_skin_depth():
    assert command.deepest_seen(data(rho=2.0)) == pytest.approx(np.sqrt(100) * 503.3, rel=1e-3)
