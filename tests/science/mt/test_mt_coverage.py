"""How often cells lie beyond two posterior standard deviations, on truths that nothing was fitted to."""

import json

import pytest
import torch

from tutti.science.em.mt import MT2D, Data
from tutti.science.em.mt.command import invert
from tutti.science.em.mt.inverse.inversion import Inversion
from tutti.science.em.mt.inverse.parameters import Pixel
from tutti.science.em.mt.inverse.posterior import COVERAGE, posterior
from tutti.science.em.mt.surveys.synthetic import basin_setting, outside_of_prior


@pytest.mark.parametrize(("kind", "most", "previous"), [("prior", 0.046, 0.2), ("outside", 0.15, 0.2)])
def test_few_cells_lie_beyond_two_standard_deviations(kind, most, previous):
    """4.6 % of a normal distribution; sharp boundaries, outside of the prior, are beyond in more cells. With the
    inversion's own penalty as the prior, deviations are sqrt(strength) of these where data say little."""
    setting = basin_setting(7, 6)
    problem = MT2D(setting.mesh, setting.frequencies, setting.sites, ("TE",), threads=1)
    truths = setting.truths(4, 900) if kind == "prior" else outside_of_prior(setting, 4, 900)
    away, strengths = [], []
    for i, truth in enumerate(truths):
        data = Data.synthetic(problem, truth, seed=900 + i)
        inversion = Inversion(problem, data)
        result = inversion.run(Pixel(setting.mesh), 2.0)
        certain = posterior(inversion, result)
        at = setting.region.rows, setting.region.columns
        away.append(((result.model - truth).abs() / certain.sd)[at])
        strengths.append(certain.strength)
    beyond = (torch.stack(away) > 2).double().mean()
    one = (torch.stack(away) > 1).double().mean()
    assert beyond < most and 0.05 < one < 0.4, "nor are they so wide that they say nothing"
    unscaled = torch.stack([x / s**0.5 for x, s in zip(away, strengths, strict=True)])
    assert (unscaled > 2).double().mean() > previous


def test_what_is_printed_says_what_standard_deviations_are(tmp_path, capsys):
    (tmp_path / "a.toml").write_text(
        'survey = {frequencies = [1.0, 10.0], sites = [-500.0, 0.0, 500.0], modes = ["TM"]}\n'
        "mesh = {rho_range = [30.0, 100.0], growth = 1.5, width = 250.0}\n"
        "[model]\nlayers = [{top = 500.0, bottom = 1e9, rho = 30.0}]\n"
    )
    assert invert(tmp_path / "a.toml", str(tmp_path / "out")) == 0
    strength = json.loads((tmp_path / "out/report.json").read_text())["prior_strength"]
    line = f"standard deviations: linearised around the model, with a prior of {strength:.2g} times the penalty; "
    assert line + COVERAGE in capsys.readouterr().out
