"""The runs: each with `--quick`, and again, which resumes. And the formulas that they measure with."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tutti.data.tokenizer import train_wordpiece
from tutti.models.pangu_beta import PanGuBetaForConditionalGeneration

ROOT = Path(__file__).parents[1]


@pytest.fixture
def runs(monkeypatch):
    """Modules of `runs` by name."""
    monkeypatch.syspath_prepend(str(ROOT / "runs"))
    names = {path.stem for path in (ROOT / "runs").glob("*.py")}
    yield __import__
    for name in names:
        sys.modules.pop(name, None)


def quick(runs, name, folder):
    """The results of a quick run, which the second call does not measure again, beside the folder of a whole run."""
    main, own = runs(name).main, folder.with_name(f"{folder.name}-quick")
    results = main(["--quick", "--out", str(folder)])
    again = main(["--quick", "--out", str(folder)])
    assert json.dumps(again) == json.dumps(results) == json.dumps(json.loads((own / "results.json").read_text()))
    assert list(folder.iterdir()) == [] and (own / "picture.png").read_bytes().startswith(b"\x89PNG")
    return results


def test_code_model(runs, tmp_path):
    results = quick(runs, "code_model", tmp_path)
    assert results["functions"] == results["functions"] | {"held out": 2}
    assert all(0 <= x <= 1 for values in results["pass"].values() for x in values.values())
    assert [step for step, _ in results["library"]["loss"]] == [1, 2, 3, 4]


@pytest.mark.starts
def test_md_schnet(runs, tmp_path):
    """A quick training, and a short simulation with the network as the config says it."""
    from tutti.science.mol.config import MDConfig

    results = runs("md_schnet").main(["--quick", "--out", str(tmp_path / "md_schnet")])
    assert results.errors.force_rmse > 0
    config = MDConfig.load(ROOT / "runs" / "md_schnet.toml")
    system, potential = replace(config, forces=replace(config.forces, network="md_schnet-quick")).build(tmp_path)
    simulation = config.simulation(system, potential).thermalize(100.0)
    assert system.atoms == 108 and simulation.run(10).count == 10


def test_reference_solutions_pass_and_others_fail(runs):
    module = runs("code_model")
    every = module.made_problems()
    assert len({problem.before for problem in every}) > 0.9 * len(every) > 250
    for problem in every[:4]:
        assert module.correct(problem, [problem.body, "    return None\n", problem.body]) == 2


def test_verdicts_are_the_same_on_two_virtual_devices(runs):
    module = runs("pangu_beta")
    rows = module.pairs(module.LANGUAGE.rows(4, 3))
    assert all(row["target"].split()[0] in ("good", "bad") for row in rows)
    assert all(row["target"].split()[1] in row["source"].split() for row in rows)
    tokenizer = train_wordpiece([row["source"] for row in rows], 100)
    torch.manual_seed(0)
    model = PanGuBetaForConditionalGeneration(module.make_config(tokenizer, True))
    results = module.inference(model, tokenizer, rows)
    for plan in ("dp2", "tp2"):
        assert results[plan]["same tokens"] and results[plan]["largest difference of logits"] < 1e-5
    batch = module.Pairs(tokenizer)(rows)
    assert batch["input_ids"].shape == (4, module.LENGTH) and batch["labels"].shape == (4, 8)
    assert (batch["labels"] == tokenizer.sep_token_id).sum() == 4


@pytest.mark.slow
def test_pangu_beta(runs, tmp_path):
    results = quick(runs, "pangu_beta", tmp_path)
    for plan in ("dp2", "tp2"):
        assert (
            results["inference"][plan]["same tokens"]
            and results["inference"][plan]["largest difference of logits"] < 1e-5
        )
    assert set(results["multi-task"]) == {"together", "together, then alone", "alone"}
    assert len(results["few-shot"]["PET"]) == len(results["few-shot"]["new head"]) == 1


@pytest.mark.starts
def test_filter_surrogate(runs, tmp_path):
    results = quick(runs, "filter_surrogate", tmp_path)
    assert results["learned"]["solver runs"] == 30 and [n for n, _ in results["learned"]["bounds"]] == [24, 30]
    assert results["best filter"]["error"] > 0 and -1 <= results["best filter"]["merit"][1] <= 1
