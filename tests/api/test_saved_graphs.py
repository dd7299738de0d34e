"""A workload is captured once: its steps are kept by what decides them."""

from __future__ import annotations

import json

import pytest

from tutti.cli.plan import workload as module
from tutti.cli.plan.workload import Captured, Workload
from tutti.hardware import machine

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64,
}  # fmt: skip


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "FOLDER", tmp_path / "cache")
    monkeypatch.delenv("TUTTI_PLANS")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    return file


def captured(config, **options) -> Captured:
    return Captured(Workload(str(config), **{"batch": 4, "seq": 16, **options}), lambda what: None)


def never(*_, **__):
    raise AssertionError("the model was built again")


def test_a_workload_is_captured_once(config, monkeypatch):
    first = captured(config)
    step = first.graph(1)
    monkeypatch.setattr(module, "load", never)
    again = captured(config.parent)  # the folder of the config
    assert again.graph(1).fingerprint == step.fingerprint and again.facts == first.facts
    assert again.graph(2).fingerprint == first.graph(2).fingerprint  # other microbatches follow from it
    for options in ({"batch": 8}, {"optimizer": "sgd"}, {"clip_norm": 1.0}, {"masters": False}):
        with pytest.raises(AssertionError, match="built again"):
            captured(config, **options).graph(1)
    config.write_text(json.dumps(CONFIG | {"num_hidden_layers": 3}))
    with pytest.raises(AssertionError, match="built again"):
        captured(config)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"work": {}}', '{"work": 1, "batch": "x"}'])
def test_a_cache_that_cannot_be_read_is_written_again(config, content):
    expected = captured(config)
    expected.graph(1)
    files = list((machine.FOLDER / "captures").rglob("*.json"))
    assert {file.name for file in files} == {"facts.json", "1.json"}
    for file in files:
        file.write_text(content)
    again = captured(config)
    assert again.facts == expected.facts and again.graph(1).fingerprint == expected.graph(1).fingerprint
    assert all(file.read_text() != content for file in files)


def test_the_least_recently_used_are_removed(config, monkeypatch):
    monkeypatch.setattr("tutti.api.saved_graphs.MOST", 2)
    folders = []
    for batch in (2, 4, 8):
        work = captured(config, batch=batch)
        work.graph(1)
        folders.append(work.cache.folder)
    assert [folder.exists() for folder in folders] == [False, True, True]


def test_nothing_is_kept_where_that_is_not_wanted(config, monkeypatch):
    monkeypatch.setenv("TUTTI_PLANS", "off")
    captured(config).graph(1)
    assert not machine.FOLDER.exists()
