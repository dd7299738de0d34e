"""Plans that were found are kept, by what was asked."""

from __future__ import annotations

import pytest
import torch

import tutti
import zoo
from tutti.hardware import machine
from tutti.ir.costs import flat
from tutti.sim import planning


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "FOLDER", tmp_path)
    monkeypatch.delenv("TUTTI_PLANS")
    return tmp_path / "plans"


def make(**options):
    model = zoo.llama(1)
    optimizer = torch.optim.AdamW(model.parameters())
    return tutti.parallelize(model, optimizer, zoo.tokens(4), cluster="cpu:2", level="O0", **options)


def test_the_same_question_is_searched_once(folder, monkeypatch):
    first = make().plan
    assert len(list(folder.iterdir())) == 1 and planning.SAID not in first.reasons

    def never(*_, **__):
        raise AssertionError("searched again")

    with monkeypatch.context() as patched:
        patched.setattr(planning, "Search", never)
        again = make().plan
        assert again.replace(reasons=()) == first.replace(reasons=()) and again.reasons[-1] == planning.SAID
        with pytest.raises(AssertionError, match="searched again"):
            make(clip_norm=1.0)
        with pytest.raises(AssertionError, match="searched again"):
            make(pins=[tutti.pin("model.norm.weight", dim=0, axis="tp")])
    make(accumulate=2)
    assert len(list(folder.iterdir())) == 2


def test_none_is_kept_where_that_is_not_wanted(folder, monkeypatch):
    monkeypatch.setenv("TUTTI_PLANS", "off")
    make()
    assert not folder.exists()


@pytest.mark.slow
def test_a_step_chooses_its_microbatches(folder):
    step = make(accumulate="auto")
    assert step.accumulate == step.plan.accumulate == 1


def test_a_named_plan_is_predicted_when_it_is_asked_for(folder):
    step = make(plan="dp")
    assert step._plan.prediction is None
    assert step.plan.predicted.step_seconds > 0 and "predicted step" in step.plan.explain()


def test_one_device_with_room_for_all_has_one_plan(folder, monkeypatch):
    def one(**options):
        model = zoo.llama(1)
        optimizer = torch.optim.AdamW(model.parameters())
        return tutti.parallelize(model, optimizer, zoo.tokens(4), cluster="cpu:1", level="O0", **options)

    scarce = one(memory="64MiB")
    total_bytes = sum(spec.bytes for node in scarce.graph.nodes for spec in flat(node.meta.get("val")))
    searched = one(memory=1.9 * total_bytes)._plan
    assert searched.prediction is not None
    with monkeypatch.context() as patched:
        patched.setattr(planning, "Search", None)
        step = one(memory=2.1 * total_bytes)
    assert (
        step._plan.prediction is None and step.plan.predicted.peak_bytes == searched.predicted.peak_bytes < total_bytes
    )
    assert step.plan.replace(reasons=(), cluster="") == searched.replace(reasons=(), cluster="")
