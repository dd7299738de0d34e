"""Checkpoints of a Trainer that are damaged are passed over, or refused."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback
from transformers.trainer_callback import ExportableState

import tutti
from tutti.checkpoint import folder as folders
from tutti.checkpoint.checkpoints import SaveError
from tutti.cli import main
from tutti.train.trainer.checkpointing import TrainerCheckpoints


def arguments(folder, **options):
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "report_to": "none"} | options
    return tutti.TrainingArguments(str(folder), use_cpu=True, disable_tqdm=True, level="O0", plan="dp", **options)


def trainer(folder, callbacks=(), **options):
    config = BertConfig(vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    rows = [{"input_ids": torch.arange(4), "labels": i % 2} for i in range(32)]
    model = BertForSequenceClassification(config)
    return tutti.Trainer(model, arguments(folder, **options), train_dataset=rows, callbacks=list(callbacks))


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    trainer(folder).train()
    return folder


def cut_in_half(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_bits(file):
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 8] = bytes(byte ^ 64 for byte in content[middle : middle + 8])
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage", "fault"),
    [
        ("trainer_state.json", cut_in_half, "trainer_state.json has "),
        ("trainer_state.json", Path.unlink, "trainer_state.json is missing"),
        ("stream.json", flip_bits, "stream.json has changed since it was written"),
        ("scheduler.pt", cut_in_half, "scheduler.pt has "),
        ("rng_state.pth", Path.unlink, "rng_state.pth is missing"),
        ("model.safetensors", flip_bits, "model.safetensors has changed since it was written"),
        ("state/step-*/*.distcp", cut_in_half, ".distcp has "),
        ("state/step-*/*.distcp", flip_bits, ".distcp has changed since it was written"),
        ("state/step-*/manifest.json", cut_in_half, "manifest.json has "),
        ("state", shutil.rmtree, " is missing"),
        ("manifest.json", cut_in_half, "its manifest.json is damaged"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_or_refused(two_checkpoints, tmp_path, name, damage, fault):
    folder = shutil.copytree(two_checkpoints, tmp_path / "run")
    damage(next((folder / "checkpoint-2").glob(name)))
    checkpoints = TrainerCheckpoints(SimpleNamespace(args=arguments(folder)))
    with pytest.raises(ValueError, match=f"checkpoint-2 is damaged: .*{re.escape(fault)}.*=True takes the newest one"):
        checkpoints.find(str(folder / "checkpoint-2"))
    with pytest.warns(UserWarning, match=f"checkpoint-2 is damaged: .*{re.escape(fault)}.*: skipped"):
        assert checkpoints.find(True) == folder / "checkpoint-1"
    assert checkpoints.find(str(folder / "checkpoint-1")) == folder / "checkpoint-1"


def test_where_all_are_damaged_none_is_taken(two_checkpoints, tmp_path):
    folder = shutil.copytree(two_checkpoints, tmp_path / "run")
    for state in folder.glob("checkpoint-*/trainer_state.json"):
        state.write_text(json.dumps({})[:1])
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="has no whole folder checkpoint-N"):
        TrainerCheckpoints(SimpleNamespace(args=arguments(folder))).find(True)


def test_the_verb_knows_checkpoints_of_a_trainer(two_checkpoints, capsys):
    for folder, step in ((two_checkpoints, 2), (two_checkpoints / "checkpoint-1", 1)):
        assert main(["checkpoint", "verify", str(folder)]) in (0, None)
        assert f"checkpoint-{step}: complete: 10 files" in capsys.readouterr().out.replace("\n", "")
        assert main(["checkpoint", "show", str(folder)]) in (0, None)
        assert f"step-{step:08d}" in capsys.readouterr().out.replace("\n", "")


@pytest.mark.parametrize("moment", [0, 7, 12])
def test_a_full_disk_at_any_moment_leaves_earlier_checkpoints(two_checkpoints, tmp_path, monkeypatch, moment):
    folder = shutil.copytree(two_checkpoints, tmp_path / "run")
    calls, to_disk = [], folders.to_disk

    def full(path):
        calls.append(path)
        if len(calls) > moment:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        to_disk(path)

    monkeypatch.setattr(folders, "to_disk", full)
    again = trainer(folder, max_steps=3)
    with pytest.raises(SaveError, match=r"could not save .*checkpoint-3: No space left on device; .*-2 is intact"):
        again.train(resume_from_checkpoint=True)
    assert sorted(x.name for x in folder.iterdir()) == ["checkpoint-1", "checkpoint-2"]
    assert again.checkpoints.find(True) == folder / "checkpoint-2"


def test_a_checkpoint_of_transformers_is_refused_with_the_remedy(two_checkpoints, tmp_path):
    folder = shutil.copytree(two_checkpoints / "checkpoint-2", tmp_path / "checkpoint-2")
    (folder / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"of tutti\.Trainer: it has no manifest\.json\. from_pretrained"):
        trainer(tmp_path).train(resume_from_checkpoint=str(folder))


class Counter(TrainerCallback, ExportableState):
    def __init__(self, name="", count=0):
        self.name, self.count = name, count

    def on_step_end(self, args, state, control, **kwargs):
        self.count += 1 if self.name == "one" else 10

    def state(self):
        return {"args": {"name": self.name}, "attributes": {"count": self.count}}


def test_callbacks_of_one_class_each_get_their_own_state(tmp_path):
    trainer(tmp_path, [Counter("one"), Counter("ten")]).train()
    options = {"max_steps": 3, "restore_callback_states_from_checkpoint": True}
    again = trainer(tmp_path, [Counter(), Counter()], **options)
    again.train(resume_from_checkpoint=True)
    counters = [x for x in again.callback_handler.callbacks if isinstance(x, Counter)]
    assert [(x.name, x.count) for x in counters] == [("one", 3), ("ten", 30)]
    with pytest.warns(UserWarning, match="has the state of 2 callbacks Counter, and the Trainer has 1"):
        trainer(tmp_path, [Counter()], **options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_crash_before_the_second_rename_puts_the_replaced_one_back(two_checkpoints, tmp_path):
    folder = shutil.copytree(two_checkpoints, tmp_path / "run")
    os.rename(folder / "checkpoint-2", folder / ".replaced-checkpoint-2")
    (folder / ".writing-checkpoint-2").mkdir()
    checkpoints = TrainerCheckpoints(SimpleNamespace(args=SimpleNamespace(output_dir=str(folder))))
    assert checkpoints.find(str(folder / "checkpoint-2")) == checkpoints.find(True) == folder / "checkpoint-2"
    assert not list(folder.glob(".*"))


def test_steps_that_are_given_as_a_share_of_the_run_are_no_other_arguments(tmp_path, recwarn):
    trainer(tmp_path, save_steps=0.5).train()
    trainer(tmp_path, save_steps=0.5).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert not [x for x in recwarn if "other arguments" in str(x.message)]
    with pytest.warns(UserWarning, match="other arguments: save_steps was 1 and is 2"):
        trainer(tmp_path, save_steps=2).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
