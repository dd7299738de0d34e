"""What `tutti plan --align` predicts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from tutti.align.rollouts.forecast import Forecast, Planner, Round, chosen, why
from tutti.cli import main
from tutti.cli.plan.workload import Captured, Workload
from tutti.hardware import Cluster
from tutti.plan.layouts.layout import Layout, Split

SIZES: dict[str, Any] = dict(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                             num_attention_heads=4, num_key_value_heads=4)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    LlamaConfig(**SIZES).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def captured(folder: str) -> Captured:
    return Captured(Workload(folder, 8, 32, dtype="float32", masters=False), lambda what: None)


def planner_of(captured: Captured, cluster: Cluster, **sizes: Any) -> Planner:
    usual: dict[str, Any] = dict(
        completions=8, generations=4, prompt=16, tokens=16, batch=8, epochs=1, reference=True, reward_model=True
    )
    return Planner(
        captured.graph, 8, LlamaConfig(**SIZES), torch.float32, cluster, Round.of("grpo", **{**usual, **sizes})
    )  # pyright: ignore


def test_placements(captured):
    """All placements of two devices, with the times of their parts. More completions take longer."""
    cluster = Cluster.parse("cpu:2")
    ranked = planner_of(captured, cluster).forecasts()
    assert {(x.placement, x.ahead) for x in ranked} == {
        ("together", False), ("replicas", False), ("apart", False), ("apart", True),
    }  # fmt: skip
    assert [x.seconds for x in ranked] == sorted(x.seconds for x in ranked)
    apart = {x.ahead: x for x in ranked if x.placement == "apart"}
    parts = apart[False]
    assert parts.seconds == pytest.approx(parts.writing + parts.scoring + parts.learning + parts.moving)
    assert apart[True].scoring == pytest.approx(1.5 * parts.scoring), "the policy scores, too, beside two models"
    ahead = apart[True]
    assert ahead.seconds == pytest.approx(max(ahead.writing, ahead.scoring + ahead.learning) + ahead.moving)
    more = planner_of(captured, cluster, completions=16, epochs=2).forecasts()
    for x in more:
        before = next(y for y in ranked if (y.placement, y.engines, y.ahead) == (x.placement, x.engines, x.ahead))
        assert x.writing > before.writing
        assert x.learning == pytest.approx(4 * before.learning, rel=0.3)
        assert x.scoring > before.scoring


def test_bytes_of_weights(captured):
    """From a replicated layout nothing is received; from one that is split otherwise, what a device lacks."""
    planner = planner_of(captured, Cluster.parse("cpu:2"))
    whole = planner.predicted.on("tp2", Cluster.parse("cpu:2")).plan
    training = planner._training(2, 0)
    replicated = replace(training, inputs={name: Layout() for name in training.inputs}, mesh={"dp": 2})
    assert planner.moved(replicated, whole) == 0
    name, spec = "param:model.embed_tokens.weight", planner.parameters["param:model.embed_tokens.weight"]
    split = replace(replicated, inputs={**replicated.inputs, name: Layout((("dp", Split(0)),))})
    serving = replace(
        whole, inputs={**whole.inputs, "param:model.model.embed_tokens.weight": Layout((("tp", Split(1)),))}
    )
    # a quarter of the table: half of its columns, half of the rows
    assert planner.moved(split, serving) == spec.bytes / 4


def test_what_does_not_fit(captured):
    small = Cluster.parse("cpu:2")
    small = replace(small, device=replace(small.device, memory=5e5))
    with pytest.raises(ValueError, match="no placement fits"):
        planner_of(captured, small).forecasts()


def test_sizes():
    with pytest.raises(ValueError, match="12 completions are no multiple of 8 generations"):
        Round(12, 8, 4, 4, 1, 1, 1)
    with pytest.raises(ValueError, match="no multiple of the 5 rows of a step"):
        Round.of("ppo", 12, 1, 4, 4, 5, 1, True, True)
    with pytest.raises(ValueError, match="completions is 0"):
        Round.of("ppo", 0, 1, 4, 4, 0, 1, True, True)
    assert Round.of("ppo", 8, 1, 4, 4, 8, 4, True, True).scored == 3
    assert Round.of("grpo", 8, 4, 4, 4, 8, 1, False, False).scored == 0


def test_all_completions_of_a_prompt_are_written_by_one_engine(captured):
    planner = planner_of(captured, Cluster.parse("cpu:4"), completions=16, generations=8)
    assert [planner._share(n) for n in (1, 2, 4)] == [16, 8, 8]


def test_a_placement_with_older_weights_must_be_worth_it():
    same = Forecast("replicas", "dp", "2 x single", 1.0, 0.0, 1.0, 0.0, 0.0, 0.0)
    ahead = Forecast("apart", "dp", "1 x single", 1.9, 0.0, 1.0, 0.0, 0.0, 0.0, True)
    assert chosen([ahead, same]) is same
    assert "learns from older weights" in why([ahead, same], same)
    faster = replace(ahead, writing=1.5)
    assert chosen([faster, same]) is faster and "a round ahead" in why([faster, same], faster)


def test_the_command(folder, tmp_path, capsys):
    main(["plan", "--align", "ppo", "--model", folder, "--cluster", "cpu:2", "--completions", "8", "--prompt", "16",
          "--tokens", "16", "--dtype", "float32", "--save", str(tmp_path / "plan.json")])  # fmt: skip
    printed = capsys.readouterr().out
    assert "options: rollout_placement = " in printed
    assert main(["plan", "--align", "ppo", "--model", folder, "--cluster", "cpu:2", "--prompt", "4096"]) == 2
    assert "more than the model's 2048 positions" in capsys.readouterr().err
    assert "chosen: " in printed and "replicas" in printed and (tmp_path / "plan.json").exists()
