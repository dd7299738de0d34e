"""The planner chooses what fits and what is fast, and says why."""

import re
from dataclasses import replace

import pytest
import torch

import tutti
import zoo
from cases import slow
from searches import predicted, search
from tutti.hardware.device import Link, Outer
from tutti.lower.shard import shard

FAST, SLOW = Link(450e9, 3e-6), Link(1e8, 1e-4)
PLANS = ["dp4", "tp4", "dp2xtp2", "zero1", "zero2", "zero3", "tp2xzero3"]


def cluster(link: Link, memory: float, devices: int = 4) -> tutti.Cluster:
    preset = tutti.Cluster.parse(f"h100:{devices}")
    device = replace(preset.device, memory=memory, beside=Outer(0, 1, 1, "nothing lies outside of it"))
    return tutti.Cluster(device, ((devices, link),))


@pytest.fixture(scope="module")
def graph():
    """Wide enough that parameters outweigh activations."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=512, num_hidden_layers=2, num_attention_heads=8, intermediate_size=1408, vocab_size=8192
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).train()
        ids = torch.empty(8, 64, dtype=torch.long)
    return tutti.capture(model, {"input_ids": ids, "labels": ids}, torch.optim.AdamW(model.parameters()))


@pytest.mark.slow
def test_fast_links_and_too_little_memory_for_replication(graph):
    replicated = predicted(graph, cluster(FAST, 1e12), "dp4").predicted.peak_bytes
    memory = 0.6 * replicated
    plan = search(graph, cluster(FAST, memory)).best(top=8)
    assert plan.prediction.peak_bytes <= memory and plan.name != "dp4"
    assert "chosen " in plan.explain()
    assert "rejected " in plan.explain() and " of a device" in plan.explain()


def test_slow_links_and_enough_memory_choose_data_parallelism():
    model = zoo.llama(1)
    batch = zoo.tokens(64, 32)
    small = tutti.capture(model, batch, torch.optim.SGD(model.parameters(), lr=0.1))
    slow = tutti.Cluster(replace(tutti.Cluster.parse("cpu").device, memory=1e12), ((4, Link(1e8, 1e-4)),))
    plan = search(small, slow).best(top=8)
    assert plan.name.startswith("auto-dp4"), "activations outweigh parameters: gradients are the least to send"
    tensor = predicted(small, slow, "tp4")
    assert tensor.predicted.communication_seconds > 2 * plan.predicted.communication_seconds
    why = plan.explain().split("why\n")[1]
    assert "chosen " in why and "communication" in why and "runner-up" in why


@pytest.mark.slow
def test_memory_that_is_impossible_is_an_error_that_says_what_would_do(graph):
    two = cluster(FAST, predicted(graph, "h100:4", "zero3").predicted.peak_bytes * 0.4)
    message = (
        r"no plan (that was found within the budget )?fits into [\d.]+ MiB per device on h100:4: the smallest, \S+, "
        r"needs [\d.]+ MiB \(.*\)(; none of the \d+ named plans .*)?; it needs "
    )
    with pytest.raises(ValueError, match=message + r"about h100:\d+: there \S+ needs [\d.]+ MiB") as failed:
        search(graph, two, budget=30).best()
    devices = int(re.search(r"about h100:(\d+)", str(failed.value))[1])
    assert search(graph, cluster(FAST, two.device.memory, devices)).best().predicted.peak_bytes <= two.device.memory
    with pytest.raises(ValueError, match="none of the larger numbers of devices that were tried suffices"):
        search(graph, cluster(FAST, 2**20), budget=10).best()


@pytest.mark.parametrize("make", [zoo.llama, slow(zoo.gpt2)])
def test_predicted_communication_is_that_of_the_program(make):
    model = make(2)
    step = tutti.capture(model, zoo.tokens(12), torch.optim.AdamW(model.parameters()), clip_norm=1.0)
    step = step.keep([name for name in step.outputs if name not in step.gradient_names])
    for name in PLANS:
        plan = predicted(step, "cpu:4", name)
        assert plan.predicted.communication_bytes == pytest.approx(shard(step, plan, 0).sent), name
