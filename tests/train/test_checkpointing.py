"""Checkpoints of a Trainer that are damaged are passed over, or refused."""

from __future__ import annotations

import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

import tutti
from tutti.cli import main
from tutti.train.checkpointing import TrainerCheckpoints


def arguments(folder, **options):
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "report_to": "none"} | options
    return tutti.TrainingArguments(str(folder), use_cpu=True, disable_tqdm=True, level="O0", plan="dp", **options)


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    config = BertConfig(vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    rows = [{"input_ids": torch.arange(4), "labels": i % 2} for i in range(32)]
    tutti.Trainer(BertForSequenceClassification(config), arguments(folder), train_dataset=rows).train()
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
        ("trainer_state.json", cut_in_half, "trainer_state.json is not JSON"),
        ("stream.json", cut_in_half, "stream.json is not JSON"),
        ("scheduler.pt", cut_in_half, "scheduler.pt is damaged"),
        ("rng_state.pth", cut_in_half, "rng_state.pth is damaged"),
        ("state/step-*/*.distcp", cut_in_half, ".distcp has "),
        ("state/step-*/*.distcp", flip_bits, ".distcp has changed since it was written"),
        ("state/step-*/manifest.json", cut_in_half, "manifest"),
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
        assert f"step-{step:08d}" in capsys.readouterr().out.replace("\n", "")
