"""Inversion of magnetotelluric data: steps against their definition, recovered earths, diagnostics and errors."""

import numpy as np
import pytest
import torch

from tutti.launch.progress import told_by
from tutti.science.em.mt import MT2D, Data, Mesh2D
from tutti.science.em.mt.inverse.columns import Background, Columns, Layer, Uniform
from tutti.science.em.mt.inverse.inversion import Candidate, Inversion, Iteration, System
from tutti.science.em.mt.inverse.mismatch import checked, mismatch
from tutti.science.em.mt.inverse.parameters import Coded, Pixel, Region
from tutti.science.em.mt.inverse.posterior import ensemble, posterior
from tutti.science.em.mt.inverse.quality import rms, sharpness, ssim
from tutti.science.em.mt.inverse.vae import VAE

MESH = Mesh2D([-20e3, -8e3, -3e3, *torch.linspace(-1e3, 1e3, 9).tolist(), 3e3, 8e3, 20e3],
              [0.0, 15, 35, 60, 90, 130, 180, 250, 340, 460, 620, 840, 1200, 2000, 4000, 8000])  # fmt: skip
REGION = Region.of(MESH, -1000, 1000, 0, 840)
FREQUENCIES, SITES = (1.0, 10.0, 100.0, 1000.0), (-800.0, -400.0, 0.0, 400.0, 800.0)


@pytest.fixture(scope="module")
def problem():
    return MT2D(MESH, FREQUENCIES, SITES, ("TE", "TM"), threads=1)


def truth(top=220.0, rho=0.8):
    model = torch.full(MESH.shape, 2.0, dtype=torch.float64)
    model[(MESH.z > top) & (MESH.z < top + 200)] = rho
    return model


@pytest.fixture(scope="module")
def columns():
    z = MESH.z[REGION.rows]
    parts = [Background(Uniform(1.7, 2.3)), Layer(Uniform(50, 400), Uniform(100, 300), Uniform(0.3, 1.2))]
    return Columns(z, parts)


@pytest.fixture(scope="module")
def vae(columns):
    return VAE(len(columns.z), 6).fit(columns, samples=4000, epochs=12, batch=128)


@pytest.mark.parametrize("shifts", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["pixel", "coded"])
def test_a_step_minimises_the_linearised_objective(problem, vae, kind, shifts):
    """In data space (cells) and in model space (codes and more data), with and without static shifts."""
    if kind == "coded":
        problem = MT2D(MESH, torch.logspace(0, 3, 12), SITES, ("TE", "TM"), threads=1)
    data = Data.synthetic(problem, truth(), seed=1)
    inversion = Inversion(problem, data, shifts=shifts)
    parameters = Pixel(MESH) if kind == "pixel" else Coded(MESH, vae, REGION)
    p = parameters.start(torch.full(MESH.shape, 2.1, dtype=torch.float64))
    p = p + 0.1 * torch.randn(len(p), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    at, local, beta = problem.linearize(parameters.model(p)), parameters.linearize(p), 0.3
    shift = 0.05 * torch.ones(inversion.shift_columns.shape[1], dtype=torch.float64) * bool(shifts)
    r = inversion.residual(at.data, shift)
    system = System(inversion, at, local, r, shift)
    assert system.data_space == (kind == "pixel")
    change, moved = system.step(beta)

    g = torch.from_numpy(
        (at.jacobian()[inversion.keep] * inversion.weights[:, None]).numpy() @ local.jacobian.toarray()
    )
    c, n = inversion.shift_columns, data.count
    rest = r - g @ change - c @ moved
    gradient = -g.T @ rest + beta * torch.from_numpy(local.matrix @ change.numpy() + local.gradient)
    assert gradient.norm() < 1e-7 * (g.T @ r).norm()
    if shifts:
        by_shift = -c.T @ rest + (shift + moved) / (n * shifts**2)
        assert by_shift.norm() < 1e-7 * (c.T @ r).norm()
    else:
        assert not moved.any()


def test_both_spaces_give_the_same_step(problem, monkeypatch):
    from tutti.science.em.mt.inverse import inversion as module

    data = Data.synthetic(problem, truth())
    inversion, parameters = Inversion(problem, data), Pixel(MESH)
    p = parameters.start(torch.full(MESH.shape, 2.0, dtype=torch.float64))
    at, local = problem.linearize(parameters.model(p)), parameters.linearize(p)
    shift = torch.zeros(inversion.shift_columns.shape[1], dtype=torch.float64)
    r = inversion.residual(at.data, shift)
    dense = System(inversion, at, local, r, shift)
    monkeypatch.setattr(module, "DENSE", 0)
    sparse = System(inversion, at, local, r, shift)
    assert dense.data_space
    torch.testing.assert_close(sparse.step(0.1)[0], dense.step(0.1)[0], rtol=1e-7, atol=1e-10)
    dense.data_space, dense.normal = False, dense.g.T @ dense.g
    dense.dense = torch.from_numpy(local.matrix.toarray())
    torch.testing.assert_close(dense.step(0.1)[0], sparse.step(0.1)[0], rtol=1e-6, atol=1e-9)


def test_derivatives_of_codes(vae):
    """dm/dp against central differences, the penalty's gradient too."""
    coded = Coded(MESH, vae, REGION, deviation=0.2)
    p = coded.start(truth())
    p = p + 0.3 * torch.randn(len(p), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    local = coded.linearize(p)
    for i in (0, 7, coded.codes - 1, coded.codes, len(p) - 1):
        step = torch.zeros_like(p)
        step[i] = 1e-2
        change = (coded.model(p + step) - coded.model(p - step)).flatten() / 2e-2
        np.testing.assert_allclose(local.jacobian[:, [i]].toarray()[:, 0], change, atol=2e-3)
        slope = (coded.linearize(p + step).penalty - coded.linearize(p - step).penalty) / 2e-2
        assert 2 * local.gradient[i] == pytest.approx(slope, rel=2e-2, abs=2e-2)


def test_only_deviations_are_punished_by_their_standard_deviation(vae):
    """For the same parameters, penalties with two standard deviations differ by |deviation|^2 (1 / a^2 - 1 / b^2)."""
    narrow, wide = (Coded(MESH, vae, REGION, deviation=sd) for sd in (0.2, 0.5))
    p = narrow.start(truth())
    wide.start(truth())
    p = p + torch.randn(len(p), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    deviations = p[-narrow.inside.size :]
    expected = float(deviations.square().sum()) * (0.2**-2 - 0.5**-2)
    assert narrow.linearize(p).penalty - wide.linearize(p).penalty == pytest.approx(expected, rel=1e-9)


def test_cells_fit_the_data_to_their_errors(problem):
    data = Data.synthetic(problem, truth(), seed=3)
    history = []
    result = Inversion(problem, data, say=lambda i, it: history.append((i, it.chi))).run(Pixel(MESH))
    assert 0.98 * 1.05 <= result.chi <= 1.05 and result.reached, "no smoother model of the step fits"
    assert [i for i, _ in history] == list(range(len(history)))
    assert result.chi == pytest.approx(data.chi(result.response))
    assert result.misfit == pytest.approx(data.misfit(result.response))
    torch.testing.assert_close(problem(result.model), result.response)
    inside = REGION.rows, REGION.columns
    assert rms(result.model[inside], truth()[inside]) < 0.45


def test_a_larger_beta_does_not_reach_the_target(problem):
    """The system of the last step is solved with 5 % more."""
    inversion = Inversion(problem, Data.synthetic(problem, truth(), seed=3))
    seen = []
    smoothest = inversion._smoothest
    inversion._smoothest = lambda candidate, *bracket: seen.append(candidate) or smoothest(candidate, *bracket)
    result = inversion.run(Pixel(MESH))
    assert seen[-1](result.beta).chi == pytest.approx(result.chi) and seen[-1](1.05 * result.beta).chi > 1.05


def test_a_step_just_below_the_target_is_taken(problem):
    """Even if it lowers chi by less than other steps must."""
    inversion = Inversion(problem, Data.synthetic(problem, torch.full(MESH.shape, 2.0)))
    last = Iteration(1.0003 * inversion.target, 0.1, 1.0, 0.0, 1.0, 1, 0.0)
    fits = Candidate(inversion.target * (1 - 1e-4), *[None] * 2, 1.0, *[None] * 2, 1.0)  # type: ignore[arg-type]
    inversion._candidate = lambda *_: fits
    assert inversion._search(*[None] * 4, 1.0, last) == (fits, 1)  # type: ignore[arg-type]


def test_codes_recover_a_truth_of_the_prior_better_than_cells(problem, vae):
    data = Data.synthetic(problem, truth(), seed=3)
    inversion, inside = Inversion(problem, data), (REGION.rows, REGION.columns)
    cells, codes = inversion.run(Pixel(MESH)), inversion.run(Coded(MESH, vae, REGION))
    assert codes.reached and not mismatch(inversion, codes)
    assert rms(codes.model[inside], truth()[inside]) < 0.8 * rms(cells.model[inside], truth()[inside])


@pytest.mark.filterwarnings("ignore:the mesh ends at 8000 m")  # 4000 ohm-m
def test_the_diagnostics_notice_an_earth_outside_of_the_prior(problem, vae):
    model = truth()
    model[(MESH.z > 60), :] = 3.6
    inversion = Inversion(problem, Data.synthetic(problem, model))
    lines = []
    outcome = checked(inversion, Coded(MESH, vae, REGION), tell=lines.append)
    assert lines[0] == "inversion of codes" and lines[-1] == "inversion of cells, without the prior"
    assert [text.partition(": ")[2] for text in lines[1:-1]] == list(outcome.mismatch.reasons), "why comes before"
    assert outcome.mismatch and outcome.mismatch.reasons
    assert isinstance(outcome.result.parameters, Pixel) and outcome.result.reached


def test_static_shifts_are_found(problem):
    data = Data.synthetic(problem, truth(), seed=4)
    wanted = torch.zeros(2, len(SITES), dtype=torch.float64)
    wanted[0, 1], wanted[1, 3] = 0.3, -0.2
    moved = data.without_shift(-wanted)
    blind, seeing = (Inversion(problem, moved, shifts=s).run(Pixel(MESH)) for s in (0.0, 0.2))
    assert seeing.reached
    assert seeing.misfit == pytest.approx(moved.misfit(seeing.response)) and moved.chi(seeing.response) < 1.06
    shifts = seeing.shift.view(2, -1)
    assert shifts[0, 1] - shifts[0, [0, 2, 3, 4]].mean() == pytest.approx(0.3, abs=0.08)
    assert shifts[1, 3] - shifts[1, [0, 1, 2, 4]].mean() == pytest.approx(-0.2, abs=0.08)
    assert not blind.shift.any()


def test_multiplicative_regularisation_reaches_the_target(problem):
    data = Data.synthetic(problem, truth(), seed=3)
    assert Inversion(problem, data, strategy="multiplicative", steps=25).run(Pixel(MESH)).reached


def test_uncertainty_of_a_linear_problem_is_exact(problem):
    """The posterior covariance and the resolution matrix against their dense formulas."""
    data = Data.synthetic(problem, truth(), seed=3)
    inversion = Inversion(problem, data)
    result = inversion.run(Pixel(MESH))
    uncertainty = posterior(inversion, result)
    j = problem.jacobian(result.model)[1] / data.errors.flatten()[:, None]
    r = torch.from_numpy(result.parameters.linearize(result.p).matrix.toarray())
    prior, local = data.count * result.beta * r, result.parameters.linearize(result.p)
    covariance = torch.linalg.inv(j.T @ j + uncertainty.strength * prior)
    determined = (covariance @ (j.T @ j)).trace().item()
    assert 0 < uncertainty.strength < 1
    assert uncertainty.strength * data.count * result.beta * local.penalty == pytest.approx(determined, rel=1e-3)
    torch.testing.assert_close(uncertainty.sd.flatten(), covariance.diagonal().sqrt(), rtol=1e-5, atol=1e-8)
    resolution = torch.linalg.inv(j.T @ j + prior) @ (j.T @ j)
    torch.testing.assert_close(uncertainty.resolution.flatten(), resolution.diagonal(), rtol=1e-5, atol=1e-7)
    assert (uncertainty.sd <= uncertainty.prior * (1 + 1e-9)).all()
    samples = ensemble(inversion, result, 24, steps=1)
    ratio = samples.std(0) / uncertainty.sd
    assert ratio.median() == pytest.approx(1, abs=0.25)


def test_what_takes_long_says_how_far_it_is(problem):
    said = []
    with told_by(said.append):
        inversion = Inversion(problem, Data.synthetic(problem, truth(), seed=3))
        result = inversion.run(Pixel(MESH))
        posterior(inversion, result)
        ensemble(inversion, result, 2, steps=1)
    covariance = f"uncertainty: covariance of {MESH.cells} parameters"
    for text in ("inverting: iteration 2", covariance, "drawing models: 1 of 2"):
        assert any(each.startswith(text) for each in said), text


def test_structural_similarity_is_its_definition():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(12, 15, generator=generator).double() for _ in range(2))
    c1, c2 = (0.01 * (b.max() - b.min())) ** 2, (0.03 * (b.max() - b.min())) ** 2
    values = []
    for i in range(12 - 6):
        for j in range(15 - 6):
            x, y = (m[i : i + 7, j : j + 7].flatten() for m in (a, b))
            cov = torch.cov(torch.stack([x, y]))
            above = (2 * x.mean() * y.mean() + c1) * (2 * cov[0, 1] + c2)
            values.append(above / ((x.mean() ** 2 + y.mean() ** 2 + c1) * (cov[0, 0] + cov[1, 1] + c2)))
    assert ssim(a, b) == pytest.approx(torch.stack(values).mean().item(), rel=1e-9)


def test_a_sharp_boundary_is_sharper_than_a_smooth_one():
    z = torch.arange(30.0)
    sharp = torch.where(z > 15, 3.0, 1.0)[:, None].expand(30, 8)
    smooth = (2 + torch.tanh((z - 15.5) / 4))[:, None].expand(30, 8)
    assert ssim(sharp, sharp) == pytest.approx(1) and sharpness(sharp, sharp, z) == pytest.approx(1)
    assert 0.3 < sharpness(smooth, sharp, z) < 0.6


def test_unknown_static_shifts_widen_the_posterior(problem):
    data = Data.synthetic(problem, truth(), seed=3)
    result = Inversion(problem, data).run(Pixel(MESH))
    sure, unsure = (posterior(Inversion(problem, data, shifts=s), result).sd for s in (0.0, 0.3))
    assert (unsure >= sure * (1 - 1e-9)).all() and (unsure / sure).max() > 1.05


def test_impedances_have_no_static_shift():
    problem = MT2D(MESH, FREQUENCIES, SITES, ("TE",), outputs="impedance", threads=1)
    values = problem(truth()).view(problem.shape)
    data = Data(problem.frequencies, problem.sites, problem.modes, values, 0.01 * values.abs(), outputs="impedance")
    with pytest.raises(ValueError, match="static shifts need apparent resistivities"):
        Inversion(problem, data, shifts=0.1)


@pytest.mark.parametrize(("change", "message"), [
    ({"strategy": "newton"}, "strategy must be one of"),
    ({"shifts": -1.0}, "must not be negative"),
    ({"target": 0.0}, "must be positive"),
])  # fmt: skip
def test_bad_options(problem, change, message):
    with pytest.raises(ValueError, match=message):
        Inversion(problem, Data.synthetic(problem, truth()), **change)


def test_data_of_another_survey_are_errors(problem):
    other = MT2D(MESH, FREQUENCIES[:2], SITES, ("TE",), threads=1)
    with pytest.raises(ValueError, match=r"use data\.problem"):
        Inversion(problem, Data.synthetic(other, truth()))


def test_a_start_in_ohm_m_is_an_error_but_trial_models_may_be_anything(problem):
    inversion = Inversion(problem, Data.synthetic(problem, truth()), steps=0)
    with pytest.raises(ValueError, match="log_rho must be log10 of ohm-m; got 100"):
        inversion.run(Pixel(MESH), 100.0)
    assert problem.linearize(torch.full(MESH.shape, 10.5), trial=True).data.isfinite().all()


def test_parameters_of_another_mesh_are_errors(problem):
    other = Pixel(Mesh2D(MESH.x_edges[1:], MESH.z_edges))
    inversion = Inversion(problem, Data.synthetic(problem, truth()))
    with pytest.raises(ValueError, match=r"another mesh, \(15, 13\) cells \(nz, nx\), than the problem, \(15, 14\)"):
        inversion.run(other)


def test_regions_outside_of_the_mesh_are_errors(vae):
    with pytest.raises(ValueError, match="holds no cell"):
        Region.of(MESH, 30e3, 40e3)
    with pytest.raises(ValueError, match="columns of the VAE"):
        Coded(MESH, vae, Region.of(MESH, -1000, 1000, 0, 300))


def test_parameters_may_be_used_again_from_another_start(problem):
    inversion, again = Inversion(problem, Data.synthetic(problem, truth()), steps=2), Pixel(MESH)
    inversion.run(again, 1.0)
    torch.testing.assert_close(inversion.run(again, 2.5).model, inversion.run(Pixel(MESH), 2.5).model)
