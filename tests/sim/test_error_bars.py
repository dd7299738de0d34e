"""Error bars: what two thirds of the published runs stay within, on the devices of the presets alone."""

import json
from pathlib import Path

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import tutti
import zoo
from tutti.hardware import Cluster
from tutti.sim.error_bars import DENSE, ERROR_BARS, EXPERTS, error_bar, kind_of, spread, within

RESULT = Path(__file__).parents[2] / "benchmarks/results/published.json"


def test_two_thirds_stay_within():
    assert within([0.3, 0.1, 0.2]) == 0.2
    assert within([0.1]) == 0.1


def test_presets_have_them_and_other_devices_do_not():
    assert spread(DENSE, Cluster.parse("h100:8")) == f" ± {100 * ERROR_BARS[DENSE]:.0f} %"
    assert error_bar(DENSE, Cluster.parse("cpu:4")) is None and spread(DENSE, Cluster.parse("cpu:4")) == ""


def test_they_are_those_of_the_benchmark():
    by_kind = json.loads(RESULT.read_text())["by_kind"]
    assert {kind: row["error_bar"] for kind, row in by_kind.items()} == pytest.approx(ERROR_BARS, abs=0.01)


def test_steps_with_experts_are_told_from_others():
    config = MixtralConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        num_local_experts=4, vocab_size=64,
    )  # fmt: skip
    for model, kind in ((zoo.llama(1), DENSE), (MixtralForCausalLM(config), EXPERTS)):
        batch = zoo.tokens(batch=2)
        batch = {name: x % 64 for name, x in batch.items()}
        assert kind_of(tutti.capture(model, batch, torch.optim.AdamW(model.parameters()))) == kind
