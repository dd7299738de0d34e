"""`tutti md` with forces of a network: the same forces as in a script, and what configs say that are wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tutti import cli
from tutti.science.mol.config import MDConfig
from tutti.science.mol.networks import Ensemble, MolCT, Network, NetworkPotential, SchNet, save
from tutti.science.mol.system import System

RUN = """
[run]
steps = 20
dt = 0.0005
temperature = 100.0
[output]
log = 5
"""
WATER = """3
pbc="F F F"
O 0.0 0.0 0.0
H 0.96 0.0 0.0
H -0.24 0.93 0.0
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    (tmp_path / "water.xyz").write_text(WATER)
    yield tmp_path
    torch.set_num_threads(threads)


def network(kind: type[Network] = SchNet, seed: int = 0) -> Network:
    torch.manual_seed(seed)
    new = kind(8, 1, 8, cutoff=3.0)  # pyright: ignore
    new.set_references({}, 0.1)
    new.seen_species[[1, 8, 18]] = True
    return new


def config(folder: Path, kind: str, more: str = "", forces: str = "") -> str:
    (folder / "runs").mkdir(exist_ok=True)
    text = f'[system]\nkind = "{kind}"\n{more}\n[forces]\nnetwork = "../trained"\n{forces}\n{RUN}'
    (folder / "runs" / "own.toml").write_text(text)
    return "runs/own.toml"


@pytest.mark.starts
@pytest.mark.parametrize(
    ("kind", "more", "atoms"),
    [
        ("coordinates", 'coordinates = "../water.xyz"', 3),
        ("coordinates", 'coordinates = "../water.xyz"\nreplicas = 2', 3),
        ("argon", "atoms = 32", 32),
        ("water", "molecules = 8", 24),
    ],
)
def test_a_network_takes_the_place_of_classical_forces(here, capsys, kind, more, atoms):
    save(network(), here / "trained")
    path = config(here, kind, more)
    assert cli.main(["md", path]) == 0
    assert "forces of SchNet, its filters in tables with a relative error of at most" in capsys.readouterr().out
    report = json.loads((here / "out/md/own/report.json").read_text())
    assert report["atoms"] == atoms and report["drift per atom"] < 1e-3
    system, potential = MDConfig.load(Path(path)).build(here / "runs")
    plain = NetworkPotential(network(), system.species)
    evaluation, expected = (x.evaluate(system.positions, system.cell, x.neighbors(system)) for x in (potential, plain))
    assert torch.allclose(evaluation.forces, expected.forces, atol=1e-3 * float(expected.forces.abs().max()))
    if kind == "coordinates":
        assert isinstance(system, System) and system.cell is None and float(system.positions[0, 1, 0]) == 0.096


@pytest.mark.parametrize("kind", [SchNet, MolCT, Ensemble])
def test_networks_run_uncompiled(here, capsys, kind):
    save(Ensemble([network(), network(seed=1)]) if kind is Ensemble else network(kind), here / "trained")
    assert cli.main(["md", config(here, "coordinates", 'coordinates = "../water.xyz"', "compile = false")]) == 0
    assert f"forces of {kind.__name__}, not compiled" in capsys.readouterr().out


@pytest.mark.starts
def test_a_run_does_not_go_on_with_other_weights(here, capsys):
    path = config(here, "coordinates", 'coordinates = "../water.xyz"')
    save(network(), here / "trained")
    assert cli.main(["md", path]) == 0
    assert cli.main(["md", path, "--steps", "40"]) == 0
    save(network(seed=1), here / "trained")
    assert cli.main(["md", path, "--steps", "60"]) == 2
    assert "has a run with another network.weights; choose another folder" in capsys.readouterr().err


@pytest.mark.starts
@pytest.mark.parametrize(
    ("kind", "more", "forces", "message"),
    [
        ("coordinates", "", "", "system.kind = 'coordinates' needs system.coordinates"),
        ("coordinates", 'coordinates = "none.xyz"', "", "there is no file runs/none.xyz"),
        ("coordinates", 'coordinates = "../bad.xyz"', "", "bad.xyz cannot be read by ASE"),
        ("coordinates", 'coordinates = "../fixed.xyz"', "", "fixed.xyz has constraints of ASE (FixAtoms), which"),
        ("coordinates", 'coordinates = "../nan.xyz"', "", "the position of atom 1 of replica 0 is not finite"),
        ("coordinates", 'coordinates = "../flat.xyz"', "", "lattice vectors of replica 0 are zero or not independent"),
        ("coordinates", 'coordinates = "../none.xyz"', "", "system.coordinates = '../none.xyz': positions have shape"),
        (
            "coordinates",
            'coordinates = "../ghost.xyz"',
            "",
            "atomic numbers from 1 to 118, one for each atom, not 0",
        ),
        ("coordinates", 'coordinates = "../methane.xyz"', "", "forces.network: the network was not trained on C, only"),
        ("lennard_jones", "", "", "forces.network needs elements, which system.kind = 'lennard_jones' has not"),
        ("argon", "", "cutoff = 1.0", "forces.cutoff is of classical forces, which forces.network replaces"),
        ("water", "", "method = 'ewald'", "forces.method is of classical forces"),
        ("argon", "atoms = 32", "compile = 1", "forces.compile = 1 should be"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(here, capsys, kind, more, forces, message):
    save(network(), here / "trained")
    files = {
        "bad": "3\n\nO 0 0\n",
        "fixed": "1\nProperties=species:S:1:pos:R:3:move_mask:L:1\nO 0 0 0 F\n",
        "nan": "2\n\nO 0 0 0\nH nan 0 1\n",
        "flat": '1\nLattice="3 0 0 3 0 0 0 0 3" pbc="T T T"\nO 0 0 0\n',
        "none": "0\n\n",
        "ghost": "2\n\nO 0 0 0\nX 0 0 2\n",
    }
    for name, text in files.items():
        (here / f"{name}.xyz").write_text(text)
    (here / "methane.xyz").write_text("2\n\nC 0 0 0\nH 0 0 1.1\n")
    assert cli.main(["md", config(here, kind, more, forces)]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("../trained", "../missing", "forces.network: there is no file runs/../missing/config.json"),
        ('network = "../trained"', "", "'coordinates' needs forces.network, as coordinates alone have no forces"),
        ('network = "../trained"', "compile = false", "'coordinates' needs forces.network"),
        ("[forces]", "[forces]\ncompile = true", "compile_for_md has no kernel for MolCT, .* forces.compile = false"),
    ],
)
def test_networks_that_cannot_be_had_are_said_in_one_line(here, capsys, old, new, message):
    save(network(MolCT), here / "trained")
    path = here / config(here, "coordinates", 'coordinates = "../water.xyz"')
    path.write_text(path.read_text().replace(old, new))
    assert cli.main(["md", "runs/own.toml"]) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in message.split(" .* ")) and "Traceback" not in error


def test_compile_is_of_networks(here, capsys):
    path = here / config(here, "argon", "atoms = 32", "compile = false")
    path.write_text(path.read_text().replace('network = "../trained"', ""))
    assert cli.main(["md", "runs/own.toml"]) == 2
    assert "forces.compile = false is for networks" in capsys.readouterr().err
