"""`tutti peptides`: a small run, interruption, other targets, and what configs say that are wrong."""

from __future__ import annotations

import csv
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from tutti import cli
from tutti.science.peptides.command import _closeness
from tutti.science.peptides.conditions import Conditions
from tutti.science.peptides.config import PeptidesConfig
from tutti.science.peptides.data import read, table
from tutti.science.peptides.grammar import grammar
from tutti.science.peptides.properties import properties
from tutti.train.trainer.counting import Counting

RUNS = Path(__file__).parents[3] / "runs"
SMALL = """
[data]
source = "grammar"
label = "active"
count = 500
shortest = 10
longest = 24
[condition]
bins = { charge = 2, active = [0.5] }
[model]
width = 16
layers = 1
heads = 2
[training]
steps = 40
learning_rate = 1e-2
[fine_tuning]
steps = 4
[sampling]
count = 40
[[targets]]
name = "positive"
bins = { charge = 1 }
[[targets]]
name = "active"
bins = { active = 1 }
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)


def run(text: str = SMALL) -> int:
    Path("small.toml").write_text(text)
    return cli.main(["peptides", "small.toml"])


def test_every_run_of_the_repository_is_a_valid_config():
    files = sorted(RUNS.glob("peptides*.toml"))
    assert [f.stem for f in files] == ["peptides", "peptides_modlamp"]
    for file in files:
        PeptidesConfig.load(file)


def test_a_run_resumes_and_takes_other_targets(here, capsys, monkeypatch):
    end = Counting.on_step_end

    def interrupted(self, args, state, control, **more):
        if state.global_step == 21:
            os.kill(os.getpid(), signal.SIGTERM)
        end(self, args, state, control, **more)

    monkeypatch.setattr(Counting, "on_step_end", interrupted)
    assert run() == 128 + signal.SIGTERM
    assert "saved step 2" in capsys.readouterr().out
    folder = here / "out/peptides/small"
    assert not (folder / "model.json").exists()
    monkeypatch.setattr(Counting, "on_step_end", end)
    assert run() == 0
    said = capsys.readouterr().out
    assert "held-out perplexity" in said and "hit" in said and "best validation loss" in said
    files = {"config.json", "data.json", "fine_tuned.json", "model.json", "peptides.csv", "peptides.fasta",
             "peptides.png", "report.json", "report.md", "samples.json"}  # fmt: skip
    assert {p.name for p in folder.iterdir()} == files | {"model", "fine_tuned", "oracle"}
    losses = json.loads((folder / "model.json").read_text())
    assert [step for step, _ in losses["training"]] == list(range(1, 41)) and len(losses["validation"]) == 10
    _check(folder)
    assert cli.main(["peptides", "small.toml", "--out", "whole"]) == 0
    for name in ("report.json", "samples.json", "model/model.safetensors"):
        assert (folder / name).read_bytes() == Path("whole", name).read_bytes(), name
    capsys.readouterr()
    assert run() == 0 and "the run is complete" in capsys.readouterr().out

    before = json.loads((folder / "report.json").read_text())
    weights = (folder / "model/model.safetensors").read_bytes()
    assert run(SMALL.replace("charge = 1 }", "charge = 0 }")) == 0
    assert "another targets; the trained model stays" in capsys.readouterr().out
    after = json.loads((folder / "report.json").read_text())
    assert (folder / "model/model.safetensors").read_bytes() == weights
    assert after["perplexity"] == before["perplexity"] and after["oracle"] == before["oracle"]
    assert after["targets"]["positive"]["asked"].startswith("charge <")
    assert run(SMALL.replace("width = 16", "width = 32")) == 2
    assert "has a run with another model.width; choose another folder" in capsys.readouterr().err


def _check(folder: Path) -> None:
    report = json.loads((folder / "report.json").read_text())
    assert set(report["sets"]) == {"held out", "unconditioned", "positive", "active", "fine-tuned"}
    assert report["perplexity"]["language model"] < 26 and report["data"]["largest identity"] < 0.6
    assert [part for part, *_ in report["data"]["parts"]] == ["train", "oracle", "validation", "held out"]
    assert set(report["targets"]["positive"]["hits"]) == {"conditioned", "fine-tuned"}
    assert set(report["targets"]["active"]["hits"]) == {"conditioned"}
    with open(folder / "peptides.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    samples = json.loads((folder / "samples.json").read_text())
    assert len(rows) == sum(round(report["sets"][name]["validity"] * 40) for name in samples)
    assert {"set", "sequence", "charge", "predicted_active", "nearest_identity"} <= set(rows[0])
    if (folder / "peptides.fasta").stat().st_size:
        assert read(folder / "peptides.fasta").names[0].startswith(("positive", "active"))
    text = (folder / "report.md").read_text()
    assert "no statement about biological activity" in text and "the grammar itself" in text
    assert (folder / "peptides.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_without_labels(here, capsys):
    lines = "".join(f">p{i}\n{x}\n" for i, x in enumerate(grammar(300).sequences))
    Path("peptides.fasta").write_text(lines)
    text = SMALL.replace('"grammar"', '"peptides.fasta"').replace('label = "active"', "")
    text = text.replace(", active = [0.5]", "").split('[[targets]]\nname = "active"')[0]
    text = text.replace("steps = 4\n", "steps = 0\n").replace("steps = 40\n", "steps = 2\n")
    assert run(text) == 0
    report = json.loads(Path("out/peptides/small/report.json").read_text())
    Path("peptides.fasta").write_text(lines + ">more\nKWKLFKKIEK\n")
    assert run(text) == 2
    assert "peptides.fasta has changed since the run in out/peptides/small began" in capsys.readouterr().err
    assert report["sets"]["held out"]["validity"] > 0.9
    assert "oracle" not in report and set(report["sets"]) == {"held out", "unconditioned", "positive"}
    assert "predicted shift" not in report["targets"]["positive"]


def test_it_is_one_process(here, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run() == 2
    assert "runs in one process; training.cluster and training.plan divide its training" in capsys.readouterr().err


def test_the_best_for_fine_tuning():
    """The highest values for the highest bin, the lowest for the lowest, those in the middle for one between."""
    conditions = Conditions({"charge": (1.0, 3.0), "moment": (2.0,)})
    values = {"charge": np.arange(5.0), "moment": np.zeros(5)}
    for bins, best in (({"charge": 2}, 4), ({"charge": 0}, 0), ({"charge": 1}, 2)):
        assert _closeness(conditions, conditions.target(bins), values).argmax() == best
    values["moment"] = np.array([9.0, 0, 0, 0, 8])
    assert _closeness(conditions, conditions.target({"charge": 2, "moment": 1}), values).argmax() == 4


def test_a_table_with_scores_and_two_devices(here):
    peptides = grammar(500).sequences
    values = properties(peptides)
    scores = (2 * values["charge"] + values["moment"]).tolist()
    Path("scores.csv").write_text(table({"peptide": peptides, "score": scores}))
    text = SMALL.replace('"grammar"', '"scores.csv"\ncolumn = "peptide"').replace('"active"', '"score"', 1)
    text = text.replace("active = [0.5]", "score = 3").replace("active = 1", "score = 2")
    losses = []
    for devices in ("", 'cluster = "cpu:2"\nplan = "dp2"\n'):
        Path("small.toml").write_text(text.replace("[training]\n", f"[training]\n{devices}"))
        assert cli.main(["peptides", "small.toml", "--out", f"out{len(devices)}"]) == 0
        losses.append(json.loads(Path(f"out{len(devices)}", "model.json").read_text())["training"])
    assert [x for _, x in losses[0]] == pytest.approx([x for _, x in losses[1]], rel=1e-5)
    report = json.loads(Path("out0/report.json").read_text())
    assert report["oracle"]["R2"] > 0.8 and report["oracle"]["coverage"] > 0.8
    assert report["targets"]["active"]["asked"].endswith("<= score")


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("steps = 40", "steps = 0", "training.steps = 0 should be above 0"),
        ("width = 16", "width = 15", "model.width = 15 is no multiple of model.heads = 2"),
        ("shortest = 10", "shortest = 30", "data.shortest = 30 is above data.longest = 24"),
        ("count = 500", "oracle = 0.4\nvalidation = 0.3", "leave less than a fifth"),
        ("count = 500", "oracle = 0.9", "leave less than a fifth to train on"),
        ("count = 500", "identity = 1.5", "data.identity = 1.5 should be between 0 and 1"),
        ("charge = 2", "size = 2", "condition.bins has no property 'size'; there are charge"),
        ("{ charge = 2, active = [0.5] }", "{}", "condition.bins is empty"),
        ("charge = 1 }", "charge = 2 }", "target 'positive': charge = 2 is no bin; there are 0 to 1"),
        ("charge = 1 }", "mass = 1 }", "target 'positive': condition.bins has no 'mass'; add it"),
        ("{ charge = 1 }", "{}", "target 'positive' asks for nothing"),
        ('"positive"', '"held out"', "names of targets should differ, and not be one of"),
        ('"positive"', '"active"', "names of targets should differ"),
        ('"positive"', '"a | b"', "target 'a | b': a name has letters"),
        ('label = "active"', 'label = "charge"', "data.label = 'charge' is the name of a property"),
        ("count = 40", "count = 40\ntop_k = -1", "sampling.top_k = -1 should not be negative"),
        ("count = 40", "count = 40\nguidance = nan", "sampling.guidance = nan should not be negative"),
        ("heads = 2", "heads = 2\ndropout = 1.0", "model.dropout = 1.0 should be from 0 to below 1"),
        ("count = 40", "count = 40\ntopk = 1", "there is no key sampling.topk; did you mean sampling.top_k?"),
    ],
)
def test_wrong_configs(here, capsys, before, after, said):
    assert before in SMALL
    assert run(SMALL.replace(before, after, 1)) == 2
    error = capsys.readouterr().err
    assert said in error and "small.toml" in error
    assert not Path("out").exists()


def test_data_that_cannot_be_used(here, capsys):
    text = SMALL.replace('label = "active"', 'label = "mic"').replace("active = [0.5]", "mic = 2")
    assert run(text.replace("active = 1", "mic = 1")) == 2
    assert "the label of the grammar is 'active'" in capsys.readouterr().err
    assert run(SMALL.replace("longest = 24", "longest = 10").replace("count = 500", "count = 20")) == 2
    assert "grammar has 2 peptides of 10 to 10 residues; 100 are the least" in capsys.readouterr().err
    assert run(SMALL.replace("active = [0.5]", "active = 2")) == 2
    assert "condition.bins.active: no training peptide is in bin 0" in capsys.readouterr().err
    assert run(SMALL.replace('"grammar"', '"modlamp:AMPs"')) == 2
    assert "modlamp has no data set 'AMPs'; there are AMPvsUniProt" in capsys.readouterr().err
    assert run(SMALL.replace('"grammar"', '"missing.csv"')) == 2
    assert "there is no file missing.csv" in capsys.readouterr().err
