"""`tutti md`: complete runs in small, interruption, and what configs say that are wrong."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch

from tutti import cli
from tutti.science.mol.config import MDConfig
from tutti.science.mol.dynamics.integrators import VelocityVerlet
from tutti.science.mol.dynamics.restart import load
from tutti.science.mol.dynamics.simulation import Simulation
from tutti.science.mol.figures import columns

RUNS = Path(__file__).parents[3] / "runs"
FLUID = """
[system]
kind = "lennard_jones"
atoms = 108
[forces]
cutoff = 2.0
[run]
steps = 100
dt = 0.004
temperature = 1.4
equilibrate = 20
[output]
log = 5
trajectory = 20
restart = 50
rdf = 2.0
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)


def config(folder: Path, text: str = FLUID) -> str:
    (folder / "fluid.toml").write_text(text)
    return "fluid.toml"


def test_every_run_of_the_repository_is_a_valid_config():
    files = sorted(RUNS.glob("md_*.toml"))
    assert [f.stem for f in files] == ["md_alanine_water", "md_argon", "md_schnet", "md_water"]
    for file in files:
        MDConfig.load(file)


def test_a_run_writes_its_results_and_is_not_run_twice(here, capsys):
    assert cli.main(["md", config(here)]) == 0
    folder = here / "out/md/fluid"
    names = {p.name for p in folder.iterdir()}
    assert names == {
        "config.json",
        "log.csv",
        "rdf.json",
        "report.json",
        "restart.safetensors",
        "restart.safetensors.old",
        "run.png",
        "trajectory.h5md",
    }
    report = json.loads((folder / "report.json").read_text())
    assert report["steps"] == 120 and report["drift per atom"] < 0.01
    capsys.readouterr()
    assert cli.main(["md", "fluid.toml"]) == 0
    assert "the run is complete, 120 steps; --steps takes more" in capsys.readouterr().out
    assert cli.main(["md", "fluid.toml", "--steps", "120"]) == 0
    assert len((folder / "log.csv").read_text().splitlines()) == 1 + 120 // 5


def test_an_interrupted_run_goes_on(here, capsys, monkeypatch):
    step = Simulation.evaluate

    def interrupted(self, virial=False):
        if self.count == 70:  # in the middle of the step that follows
            os.kill(os.getpid(), signal.SIGTERM)
        step(self, virial)

    monkeypatch.setattr(Simulation, "evaluate", interrupted)
    assert cli.main(["md", config(here)]) == 128 + signal.SIGTERM
    assert "step 71: saved; the same command goes on" in capsys.readouterr().out
    monkeypatch.setattr(Simulation, "evaluate", step)
    assert cli.main(["md", "fluid.toml"]) == 0
    lines = (here / "out/md/fluid/log.csv").read_text().splitlines()[1:]
    assert [int(line.split(",")[0]) for line in lines] == list(range(25, 121, 5))
    assert cli.main(["md", "fluid.toml", "--out", "whole"]) == 0
    parts, whole = (json.loads(Path(folder, "rdf.json").read_text()) for folder in ("out/md/fluid", "whole"))
    assert parts["configurations"] == whole["configurations"] == 20
    assert parts["g"] == pytest.approx(whole["g"], abs=1e-9)
    assert parts["error"] == pytest.approx(whole["error"], abs=1e-9)


def test_another_config_in_the_same_folder_is_refused(here, capsys):
    assert cli.main(["md", config(here)]) == 0
    assert cli.main(["md", config(here, FLUID.replace("1.4", "1.5"))]) == 2
    assert "has a run with another run.temperature; choose another folder by --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("atoms = 108", "atoms = 100", "fill no face-centred cubic lattice; near are 108 and 256"),
        ("dt = 0.004", "dt = -1.0", "run.dt = -1.0 should be above 0"),
        ("cutoff = 2.0", "cutof = 2.0", "there is no key forces.cutof; did you mean forces.cutoff?"),
        ("temperature = 1.4", "temperature = 0.0\nensemble = 'nvt'", "needs run.temperature above 0"),
        ('kind = "lennard_jones"', 'kind = "serialized"', "needs system.coordinates"),
        ("atoms = 108", "atoms = 108\nsolvate = 1.0", "system.solvate is of system.kind = 'openmm', not of 'lennard_"),
        ("atoms = 108", "atoms = 108\nsolvate = -1.0", "system.solvate = -1.0 is negative"),
        (
            '"lennard_jones"\natoms = 108\n[forces]',
            '"water"\n[forces]\nmethod = "none"',
            "forces.method = 'none' is for molecules without a cell, and system.kind = 'water' has one; take 'pme'",
        ),
        (
            '"lennard_jones"\natoms = 108\n[forces]',
            '"openmm"\ncoordinates = "a.pdb"\nfiles = ["a.xml"]\nsolvate = 1.0\n[forces]\nmethod = "none"',
            "and system.solvate gives the molecule one; take 'pme'",
        ),
        ("dt = 0.004", "dt = nan", "run.dt = nan is not finite"),
        ("temperature = 1.4", "temperature = inf", "run.temperature = inf is not finite"),
        ("cutoff = 2.0", "cutoff = inf", "forces.cutoff = inf is not finite"),
        ("rdf = 2.0", "rdf = 2.0\npairs = ['Xx', 'Ar']", "the system has no atom of 'Xx'"),
        ("dt = 0.004", "dt = 0.05", "Take a shorter time step than 0.05"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(here, capsys, old, new, message):
    assert cli.main(["md", config(here, FLUID.replace(old, new))]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_a_distribution_without_a_cell_and_negative_steps_are_refused_before_the_run(here, capsys):
    pytest.importorskip("openmm")
    pdb = RUNS / "alanine_dipeptide.pdb"
    molecule = f'"openmm"\ncoordinates = "{pdb}"\nfiles = ["amber14/protein.ff14SB.xml"]\n[forces]\nmethod = "none"'
    text = FLUID.replace('"lennard_jones"\natoms = 108\n[forces]', molecule).replace("cutoff = 2.0", "")
    assert cli.main(["md", config(here, text)]) == 2
    assert "output.rdf needs a cell that repeats in three directions" in capsys.readouterr().err
    assert cli.main(["md", config(here), "--steps", "-5"]) == 2
    assert "--steps is -5; expected 1 or more" in capsys.readouterr().err
    assert not (here / "out").exists()


def test_output_of_a_run_that_cannot_go_on_is_replaced(here):
    folder = here / "out/md/fluid"
    folder.mkdir(parents=True)
    (folder / "log.csv").write_text("step\n1\n")
    (folder / "trajectory.h5md").write_text("x")
    assert cli.main(["md", config(here)]) == 0
    assert len((folder / "log.csv").read_text().splitlines()) == 1 + 100 // 5


def test_water_at_constant_pressure(here):
    text = """
[system]
kind = "water"
molecules = 27
[run]
steps = 20
dt = 0.001
temperature = 300.0
ensemble = "npt"
minimize = 50
[output]
log = 5
"""
    assert cli.main(["md", config(here, text)]) == 0
    report = json.loads((here / "out/md/fluid/report.json").read_text())
    assert report["atoms"] == 81 and 0.5 < report["volume"]["mean"] < 1.2


def test_pressure_is_in_bar_and_units_are_said(here, capsys):
    text = (
        FLUID.replace("lennard_jones", "argon").replace("[forces]\ncutoff = 2.0", "").replace("rdf = 2.0", "rdf = 0.6")
    )
    assert cli.main(["md", config(here, text.replace("1.4", "94.0"))]) == 0
    folder = here / "out/md/fluid"
    table = list(csv.DictReader((folder / "log.csv").read_text().splitlines()))
    assert list(table[0]) == [
        "step", "replica", "time (ps)", "potential (kJ/mol)", "kinetic (kJ/mol)", "temperature (K)",
        "conserved (kJ/mol)", "volume (nm^3)", "pressure (bar)",
    ]  # fmt: skip
    series = columns(folder / "log.csv")
    system, potential = MDConfig.load(here / "fluid.toml").build(here)
    simulation = Simulation(system, potential, VelocityVerlet(0.004))
    load(simulation, folder / "restart.safetensors")
    assert float(series["pressure"][-1]) == pytest.approx(float(simulation.pressure()) * 16.6053906717, rel=1e-9)
    report = json.loads((folder / "report.json").read_text())
    assert report["units"]["pressure"] == "bar" and report["units"]["potential"] == "kJ/mol"
    assert report["pressure"]["mean"] == pytest.approx(float(series["pressure"].mean()))
    said = capsys.readouterr().out
    assert re.search(r"temperature \S+ \+- \S+ K, potential \S+ \+- \S+ kJ/mol, pressure \S+ \+- \S+ bar, drift", said)


def test_processes_share_a_run_and_one_process_goes_on_with_it(here):
    text = FLUID.replace("atoms = 108", "atoms = 256")
    assert cli.main(["md", config(here, text), "--out", "one"]) == 0
    assert cli.main(["md", config(here, text), "--out", "two", "--processes", "2", "--steps", "60"]) == 0
    report = json.loads((here / "two/report.json").read_text())
    assert report["processes"] == 2 and report["atoms"] == 256 and report["steps"] == 80
    assert cli.main(["md", config(here, text), "--out", "two"]) == 0
    tables = [columns(here / name / "log.csv") for name in ("one", "two")]
    for name, values in tables[0].items():
        assert tables[1][name].tolist() == pytest.approx(values.tolist(), rel=1e-9, abs=1e-9), name
    assert cli.main(["md", config(here, text), "--processes", "0"]) != 0
