"""`tutti mt`: from a config to pictures, and what is said of a wrong config."""

import json
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

from tutti import cli
from tutti.science.em.mt.config import MTConfig
from tutti.science.em.mt.inverse.columns import PRIORS
from tutti.science.em.mt.keys import sections
from tutti.science.em.mt.surveys.data import Data

RUNS = Path(__file__).parents[3] / "runs"

SMALL = """
[survey]
modes = ["TE", "TM"]
frequency_range = [1.0, 1000.0]
frequency_count = 4
site_range = [-800.0, 800.0]
site_count = 5

[mesh]
x_edges = [-20e3, -8e3, -3e3, -1000.0, -600.0, -200.0, 200.0, 600.0, 1000.0, 3e3, 8e3, 20e3]
z_edges = [0.0, 15.0, 35.0, 60.0, 90.0, 130.0, 180.0, 250.0, 340.0, 460.0, 620.0, 840.0, 1200.0, 2000.0, 4000.0, 8000.0]

[model]
background = 100.0
layers = [{ top = 400.0, bottom = 1e9, rho = 1000.0 }]
bodies = [{ x = [-500.0, 500.0], z = [100.0, 300.0], rho = 5.0 }]
"""


def run(tmp_path, text, verb="invert"):
    (tmp_path / "a.toml").write_text(text)
    return cli.main(["mt", verb, str(tmp_path / "a.toml"), "--out", str(tmp_path / "out")])


def test_forward_then_invert_its_data(tmp_path, capsys):
    assert run(tmp_path, SMALL, "forward") == 0
    assert "15 x 11 cells, 4 frequencies, 5 sites, TE, TM" in capsys.readouterr().out
    with np.load(tmp_path / "out" / "model.npz") as arrays:
        model = arrays["log_rho"]
    assert model[5, 5] == pytest.approx(np.log10(5)) and model[-1, 0] == 3 and model[0, 0] == 2
    without = SMALL.partition("[model]")[0].replace("frequency_range", "#").replace("site_range", "#")
    text = without + f'[data]\npath = "{tmp_path}/out/data.csv"\n[inversion]\nsamples = 2\n'
    assert run(tmp_path, text) == 0
    out = capsys.readouterr().out
    assert "80 data, 165 cells" in out and "chi" in out
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert list(report["shift"]) == ["TE", "TM"] and list(report["shift"]["TE"]) == [
        "-800.0", "-400.0", "0.0", "400.0", "800.0"]  # fmt: skip
    assert report["reached"] and report["chi"] <= 1.05 and report["iterations"][0]["chi"] > 5
    with np.load(tmp_path / "out" / "result.npz") as arrays:
        result = dict(arrays)
    assert result["sd"].shape == result["resolution"].shape == (15, 11) and result["samples"].shape == (2, 15, 11)
    assert 0 < result["resolution"].max() <= 1
    for name in ("model", "data", "fits", "convergence", "uncertainty"):
        assert (tmp_path / "out" / f"{name}.png").stat().st_size > 5000


def test_forward_takes_the_survey_of_data(tmp_path, capsys):
    assert run(tmp_path, SMALL, "forward") == 0
    second = SMALL.partition("[mesh]")[2]
    other = f'[data]\npath = "{tmp_path}/out/data.csv"\n[mesh]{second.replace("rho = 5.0", "rho = 50.0")}'
    (tmp_path / "b.toml").write_text(other)
    assert cli.main(["mt", "forward", str(tmp_path / "b.toml"), "--out", str(tmp_path / "b")]) == 0
    ours, theirs = (Data.load(tmp_path / name / "data.npz") for name in ("b", "out"))
    assert (ours.sites, ours.modes) == (theirs.sites, theirs.modes) and not ours.values.equal(theirs.values)
    assert ours.frequencies == pytest.approx(theirs.frequencies)


def test_noise_of_zero_leaves_exact_responses(tmp_path):
    quiet = SMALL + "[noise]\nrho = 0.0\nphase = 0.0\n"
    seeds = [quiet, quiet + "seed = 1\n"]
    first, second = (Data.load(tmp_path / "out" / "data.npz") for text in seeds if run(tmp_path, text, "forward") == 0)
    assert first.values.equal(second.values) and first.errors[0, 0, 0].tolist() == pytest.approx(
        [0.01 / np.log(10), 0.286]
    )


def test_the_exit_code_says_that_data_were_not_fitted(tmp_path, capsys):
    assert run(tmp_path, SMALL + "[inversion]\nsteps = 1\n") == 1
    assert "the target, chi 1.05, was not reached" in capsys.readouterr().out


def test_a_mesh_that_is_too_coarse_is_one_line(tmp_path, capsys):
    """pytest raises what a user is told; here it is told."""
    coarse = SMALL.replace("0.0, 15.0, 35.0, 60.0, 90.0, 130.0, 180.0, 250.0,", "0.0, 250.0,")
    assert run(tmp_path, coarse, "forward") == 0
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "an edge of cells there" not in x]
    assert line.startswith("warning: the row of cells from 0 to 250 m is too thick for 1000 Hz")


def test_bodies_and_layers_that_the_cells_do_not_follow_are_lines(tmp_path, capsys):
    text = SMALL.replace("top = 400.0, bottom = 1e9", "top = 395.0, bottom = 700.0")
    assert run(tmp_path, text, "forward") == 0
    top, bottom, *body = capsys.readouterr().err.splitlines()
    wanted = "warning: layer 1: its {} is at {} m on this mesh, {} m wanted; an edge of cells there (mesh.z_edges)"
    assert top.startswith(wanted.format("top", 340, 395)) and bottom.startswith(wanted.format("bottom", 620, 700))
    assert [line.partition(" wanted")[0] for line in body] == [
        "warning: body 1: its left side is at -600 m on this mesh, -500 m",
        "warning: body 1: its right side is at 600 m on this mesh, 500 m",
        "warning: body 1: its top is at 90 m on this mesh, 100 m",
        "warning: body 1: its bottom is at 340 m on this mesh, 300 m",
    ]
    exact = SMALL.replace("[-500.0, 500.0], z = [100.0, 300.0]", "[-600.0, 600.0], z = [90.0, 340.0]")
    assert run(tmp_path, exact.replace("top = 400.0", "top = 340.0"), "forward") == 0
    assert not capsys.readouterr().err


@pytest.mark.parametrize(("text", "message"), [
    (SMALL.replace("top = 400.0, bottom = 1e9", "top = 405.0, bottom = 406.0"), "holds the centre of no row"),
    (SMALL + "[inversion]\nsamples = -1\n", "a.toml: inversion.samples = -1 must not be negative"),
    (SMALL + "[inversion]\nalong = -1.0\n", "inversion.along = -1 must not be negative"),
    ('[survey]\nsetting = "basin"\n[mesh]\ngrowth = 1.2\n[model]\n', "[mesh] has no effect"),
    ("[survey]\nfrequencys = [1.0]\n", "did you mean survey.frequencies?"),
    ("[survey]\nfrequencies = [1.0]\n[model]\n", "the survey has no sites"),
    (SMALL + "[noise]\nrho = -0.1\n", "noise.rho = -0.1 must not be negative"),
    (SMALL + "[data]\nfloor_rho = nan\n", "data.floor_rho = nan must not be negative"),
    (SMALL.replace("{ x = [-500.0, 500.0]", "{ left = 0.0"), "model.bodies.left; [model.bodies] has x, z, rho\n"),
    ("[mesh]\nbottom = 3.0\n", "[mesh] has rho_range, growth, width, depth, margin, x_edges, z_edges; prior.bottom is"),
    ("[survey]\nfrequencies = 3\n", "should be a list of numbers"),
    (SMALL.replace("rho = 5.0", "rho = -5.0"), "model.bodies[0].rho = -5 must be positive, in ohm-m"),
    (SMALL.replace("[-500.0, 500.0], z", "[90e3, 91e3], z"), "holds the centre of no cell"),
    (SMALL.replace("site_range = [-800.0, 800.0]", "site_range = [-90e3, 800.0]"), "outside"),
    (SMALL.replace(", rho = 5.0", ""), "[model.bodies] needs rho"),
    (SMALL.replace("[1.0, 1000.0]", "[-1.0, 1000.0]"), "survey.frequency_range = -1 must be positive, in Hz"),
    (SMALL + '[inversion]\nparameters = "codes"\n', "needs prior.columns"),
    (SMALL + "[inversion]\nstart = -1.0\n", "inversion.start = -1 must be positive"),
    (SMALL.partition("[model]")[0], "neither data.path nor a [model]"),
    ('[data]\npath = "no/*.edi"\n', "no file matches"),
    ('[data]\npath = "no.csv"\n', "no file data.path = 'no.csv'"),
    (SMALL.replace("[survey]", "[survey]\nsites = [0.0]"), "survey.sites and survey.site_range: leave one out"),
    (SMALL.replace("[survey]", "[survey]\nfrequencies = [1.0]"), "and survey.frequency_range: leave one out"),
    (SMALL.replace("z_edges", "growth = 1.3\nz_edges"), "mesh.growth has no effect with mesh.x_edges"),
    (SMALL.replace("z_edges", "# "), "mesh.x_edges and mesh.z_edges are given together"),
    (SMALL.replace("[-500.0, 500.0], z", "[500.0, -500.0], z"), "x = [500, -500]: write the smaller first"),
    (SMALL.replace("bottom = 1e9", "bottom = 300.0"), "top = 400 not above bottom = 300"),
])  # fmt: skip
def test_wrong_configs(tmp_path, capsys, text, message):
    assert run(tmp_path, text) == 2
    assert message in capsys.readouterr().err


def test_the_example_names_every_key():
    """In a section of its own, or as a comment that is a valid line."""
    path = RUNS / "mt_example.toml"
    text = path.read_text()
    MTConfig.load(path)
    parts = re.split(r"^(\[+[\w.]+\]+) *(?:#.*)?$", text, flags=re.MULTILINE)
    named = dict(zip(["", *parts[1::2]], parts[::2], strict=True))
    for heading, _, keys in sections(MTConfig):
        for key in keys:
            line = re.search(rf"^(?:# )?{key.name} = [^#\n]+", named[heading], re.MULTILINE)
            assert line, f"{heading} {key.name}"
            tomllib.loads(line[0].removeprefix("# "))


def test_every_key_has_a_meaning():
    for heading, meaning, keys in sections(MTConfig):
        assert meaning and all(key.meaning for key in keys), heading


def test_every_run_of_the_repository_is_a_valid_config():
    files = sorted(RUNS.glob("mt_*.toml"))
    assert [f.stem for f in files] == ["mt_basin", "mt_example", "mt_samtex"]
    for file in files:
        table = MTConfig.load(file)
        mesh, frequencies, sites = table.geometry(None)
        assert table.truth(mesh).shape == mesh.shape and frequencies and sites
        assert table.inversion.parameters == "cells" or table.columns() in PRIORS


def test_a_start_that_fits_has_no_uncertainty_and_says_so(tmp_path, capsys):
    assert run(tmp_path, SMALL + "[inversion]\ntarget = 1e6\n", "invert") == 0
    assert "the inversion made no step: no uncertainty" in capsys.readouterr().out
