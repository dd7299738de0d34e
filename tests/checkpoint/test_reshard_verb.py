"""Offline: a checkpoint in the blocks of another plan, and the verbs that look at one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import tutti
import zoo
from tutti import cli
from tutti.checkpoint.folder import find_fault, manifest
from tutti.checkpoint.reader import CheckpointReader
from tutti.checkpoint.reshard import reshard
from tutti.plan.plan import Plan


def parallelized(plan: str, devices: int) -> tutti.Step:
    model = zoo.llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return tutti.parallelize(model, optimizer, zoo.tokens(), cluster=f"cpu:{devices}", plan=plan, level="O0")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, Plan]:
    """A checkpoint of two devices, and a plan for four."""
    step, checkpoints = parallelized("dp2", 2), tutti.Checkpoints(tmp_path_factory.mktemp("run") / "checkpoints")
    step(zoo.tokens())
    step.save(checkpoints, fill=lambda folder: (folder / "config.json").write_text("{}"))
    return checkpoints.wait(), parallelized("tp2xzero3", 4).plan


def test_the_same_state_in_other_blocks(saved, tmp_path):
    folder, plan = saved
    seen = []
    new = reshard(folder, plan, tmp_path, lambda done, ranks: seen.append((done, ranks)))
    assert seen == [(i, 4) for i in range(5)] and find_fault(new) is None
    assert len(list(new.glob("*.distcp"))) == 4 and (new / "config.json").read_text() == "{}"
    before, after = CheckpointReader(folder), CheckpointReader(new)
    assert before.tensors == after.tensors
    assert max(map(len, after.blocks.values())) >= 4  # a strided split is many blocks on each device
    assert all(torch.equal(before.whole(name), after.whole(name)) for name in before.tensors)
    about = manifest(new)
    assert about["plan"]["name"] == plan.name and about["step"] == manifest(folder)["step"] == 1
    step = parallelized("zero3", 4)
    step.load(new)
    assert step.steps == 1


def test_a_plan_that_does_not_fit_leaves_nothing(saved, tmp_path):
    folder, plan = saved
    layout = next(layout for layout in plan.inputs.values() if layout.splits)
    impossible = plan.replace(inputs={label: layout for label in manifest(folder)["labels"].values()})
    with pytest.raises(ValueError):
        reshard(folder, impossible, tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_is_there_already_is_left_alone_and_another_model_refused(saved, tmp_path):
    folder, plan = saved
    with pytest.raises(ValueError, match="already exists: choose another folder"):
        reshard(folder, plan, folder.parent)
    other = plan.replace(inputs={label.replace("up_proj", "fc_1"): x for label, x in plan.inputs.items()})
    with pytest.raises(ValueError, match=r"the plan is for another model: it has a layout for 'param:.*fc_1"):
        reshard(folder, other, tmp_path)


def test_verbs(saved, tmp_path, capsys):
    folder, plan = saved
    run = folder.parents[1]
    plan.save(tmp_path / "plan.json")
    assert cli.main(["reshard", str(run), str(tmp_path / "out"), "--plan", str(tmp_path / "plan.json")]) == 0
    new = tmp_path / "out" / folder.name
    assert f"{new}: written under tp2xzero3" in capsys.readouterr().out
    assert cli.main(["checkpoint", "show", str(run)]) == 0
    out = capsys.readouterr().out
    assert f"{folder}: step 1, seed 0" in out and "written under dp2" in out
    assert "parameters" in out and "exp_avg_sq" in out and "a file of tensors" in out
    assert cli.main(["checkpoint", "verify", str(run)]) == 0
    assert f"{folder}: complete: 3 files" in capsys.readouterr().out
    assert cli.main(["checkpoint", "diff", str(run), str(new)]) == 0
    assert "tensors are equal" in capsys.readouterr().out


def test_what_differs_is_shown_and_what_is_broken(saved, tmp_path, capsys):
    folder, _ = saved
    step, checkpoints = parallelized("tp2", 2), tutti.Checkpoints(tmp_path / "other")
    step(zoo.tokens(seed=5))
    step(zoo.tokens(seed=6))
    step.save(checkpoints)
    other = checkpoints.wait()
    assert cli.main(["checkpoint", "diff", str(folder), str(other)]) == 1
    out = capsys.readouterr().out
    assert "step: 1 and 2" in out and "largest difference" in out and "param:" in out
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / "__0_0.distcp").unlink()
    assert cli.main(["checkpoint", "verify", str(broken)]) == 1
    assert "__0_0.distcp is missing" in capsys.readouterr().out
    assert cli.main(["checkpoint", "show", str(tmp_path)]) == 2
    assert f"{tmp_path} is neither a checkpoint nor a run folder with checkpoints" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"is not complete: __0_0\.distcp is missing"):
        reshard(broken, parallelized("tp2", 2).plan, tmp_path / "new")
    with pytest.raises(ValueError, match=r"is not complete: __0_0\.distcp is missing"):
        step.load(broken)
    with pytest.raises(ValueError, match=r"is no checkpoint: it has no manifest\.json; it holds some: name one, as"):
        step.load(tmp_path / "other")
    assert not (tmp_path / "new").exists()
    (broken / "manifest.json").write_text(json.dumps({"files": {}}))
    assert cli.main(["checkpoint", "diff", str(broken), str(other)]) == 2
    assert "its manifest.json is damaged" in capsys.readouterr().err
