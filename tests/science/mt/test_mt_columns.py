"""Declared distributions of columns, and codes that stand for them."""

import math

import pytest
import torch

from tutti.science.em.mt.inverse.columns import (
    Background,
    Blur,
    Bumps,
    Columns,
    Either,
    Layer,
    Rising,
    Uniform,
    basin,
    samtex,
)
from tutti.science.em.mt.inverse.vae import VAE
from tutti.science.em.mt.surveys.synthetic import basin_setting, outside_of_prior, samtex_setting

Z = torch.linspace(0, 1000, 33)[:-1] + 15


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_a_layer_lies_where_it_is_declared():
    u = torch.tensor([[0.5, 0.25, 0.5, 0.75, 0.0]], dtype=torch.float64)
    columns = Columns(Z, [Background(Uniform(1, 3)), Layer(Uniform(200, 600), Uniform(100, 300), Uniform(0, 1))])
    profile = columns.render(u)[0]
    inside = (Z >= 300) & (Z < 500)
    assert profile[inside].unique().tolist() == [0.75] and profile[~inside].unique().tolist() == [2.0]


def test_probabilities_and_mixtures():
    columns = Columns(Z, [
        Background(Either(Uniform(0, 1), Uniform(2, 3), 0.3)),
        Layer(Uniform(0, 0), Uniform(2000, 2000), Uniform(9, 9), probability=0.2),
    ]).sample(20_000, generator())  # fmt: skip
    layered = columns[:, 0] == 9
    assert layered.double().mean().item() == pytest.approx(0.2, abs=0.01)
    rest = columns[~layered, 0]
    assert (rest < 1).double().mean().item() == pytest.approx(0.3, abs=0.015)
    assert rest[rest < 1].mean().item() == pytest.approx(0.5, abs=0.02)


def test_values_rise_with_depth_below_the_conductor():
    columns = Columns(Z, [Background(Uniform(3, 4)), Layer(Uniform(50, 100), Uniform(100, 200), Uniform(0, 1)),
                          Rising(Uniform(2.6, 2.7), Uniform(4.4, 4.5), 1000.0)]).sample(200, generator())  # fmt: skip
    below = Z > 320
    assert (columns[:, below].diff(dim=1) >= 0).all()
    assert columns[:, below].min() >= 2.6 and columns[:, below].max() <= 4.5
    assert (columns[:, Z < 40] >= 3).all()


def test_bumps_and_blur():
    flat = Columns(Z, [Background(Uniform(2, 2))])
    bumps = Columns(Z, [*flat.parts, Bumps(2, Uniform(2, 3), Uniform(0.1, 0.4))]).sample(500, generator()) - 2
    assert 0.1 < bumps.abs().amax(1).median() < 0.4 and bumps.abs().max() <= 0.81
    step = torch.cat([torch.zeros(1, 16), torch.ones(1, 16)], 1).double()
    smooth = Blur(3, 1.0)(step, torch.zeros(1, 0), Z)
    weights = [math.exp(-0.5), 1, math.exp(-0.5)]
    assert smooth[0, 15].item() == pytest.approx(weights[2] / sum(weights))
    assert smooth[0, 0] == 0 and smooth[0, -1] == pytest.approx(1)


@pytest.mark.parametrize("prior", [basin, samtex])
def test_columns_of_sections_are_those_of_the_distribution(prior):
    z = Z if prior is basin else Z * 80
    columns = prior(z)
    x = torch.linspace(0, 10_000, 40)  # float32
    sections = columns.sections(150, x, 2000.0, generator())
    single = columns.sample(6000, generator(1))
    assert sections.shape == (150, 32, 40)
    for q in (0.1, 0.5, 0.9):
        ours, wanted = sections.permute(0, 2, 1).flatten(0, 1).quantile(q, 0), single.quantile(q, 0)
        torch.testing.assert_close(ours, wanted, atol=0.25, rtol=0)
    near, far = ((sections[..., 0] - sections[..., i]).abs().mean() for i in (1, 39))
    assert near < 0.25 * far


def test_a_vae_reconstructs_its_columns_with_codes_near_a_standard_normal():
    columns = basin(Z)
    vae = VAE(32, 12).fit(columns, samples=10_000, epochs=6, batch=100, noise=0.1)
    data = columns.sample(1000, generator(5)).float()
    assert vae.error(data) < 0.2 < 0.5 * data.std()
    codes = vae.encode(data)
    assert codes.mean(0).abs().max() < 0.7 and 0.5 < codes.square().mean() < 1.6
    torch.testing.assert_close(vae.encode(data[:3]), codes[:3])


def test_a_vae_is_saved_and_loaded(tmp_path):
    vae = VAE(16, 4, "convolutional").fit(basin(Z[::2]), samples=512, epochs=1)
    vae.save(tmp_path / "vae.pt")
    codes = torch.randn(5, 4, generator=generator())
    torch.testing.assert_close(VAE.load(tmp_path / "vae.pt").decode(codes), vae.decode(codes))


@pytest.mark.parametrize("write", [
    lambda path: path.write_text("text"),
    lambda path: path.write_bytes(b""),
    lambda path: torch.save({"facts": {"rows": 16, "codes": 4, "network": "dense"}}, path),
])  # fmt: skip
def test_files_that_hold_no_prior_are_named(tmp_path, write):
    write(tmp_path / "vae.pt")
    with pytest.raises(ValueError, match=r"vae\.pt is no prior that this version saved"):
        VAE.load(tmp_path / "vae.pt")


def test_fitting_is_reproducible():
    first, second = (VAE(32, 4).fit(basin(Z), samples=512, epochs=1) for _ in range(2))
    assert all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize(("call", "message"), [
    (lambda: Uniform(2, 1), "low <= high"),
    (lambda: VAE(30, 4, "convolutional"), "no multiple of 8"),
    (lambda: VAE(32, 4, "deep"), "network must be one of"),
    (lambda: VAE(16, 4).fit(basin(Z), samples=300), "columns have 32 rows"),
    (lambda: VAE(32, 4).fit(basin(Z), samples=10), "at least a batch"),
])  # fmt: skip
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_settings_have_the_published_geometry():
    setting = samtex_setting()
    assert setting.mesh.shape == (64, 100) and len(setting.sites) == 36 and len(setting.frequencies) == 20
    assert setting.mesh.z_edges[-1] == pytest.approx(84.03e3, rel=1e-3)
    assert setting.mesh.z_edges[32] == pytest.approx(1060, rel=0.01)
    truth = basin_setting().truths(2, 3)
    assert truth.shape == (2, *basin_setting().mesh.shape) and truth.isfinite().all()
    outside = outside_of_prior(basin_setting(), 4)
    assert outside.shape[0] == 4 and len({round(float(m.std()), 4) for m in outside}) == 4
