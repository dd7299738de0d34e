"""The choices of all axes together: what is shared, what memory costs, what a search that ends early says."""

import pytest
import torch
import transformers

import tutti
import zoo
from tutti.plan.estimate import Estimator
from tutti.plan.joint import Joint
from tutti.plan.planner import Planner
from tutti.plan.price import Pricer
from tutti.plan.problem import problem_of
from tutti.plan.roles import Free
from tutti.plan.title import title


@pytest.fixture(scope="module")
def graph():
    model = zoo.llama(2)
    return tutti.capture(model, zoo.tokens(24, 32), torch.optim.AdamW(model.parameters()))


@pytest.fixture(scope="module")
def joint(graph):
    return Joint(problem_of(graph), Pricer(tutti.Cluster.parse("cpu:4"), {"dp": 2, "tp": 2}))


def held(joint, chosen) -> float:
    """Bytes of what stays in memory under these choices, of inputs."""
    total = 0.0
    for label, options in joint.options.items():
        if label in joint.bytes:
            total += joint.bytes[label][options.choices.index(chosen.choices[label])]
    return total


def test_a_price_on_memory_buys_less_memory_for_more_time(joint):
    free, dear = joint.choose(), joint.choose(memory_price=1e-9)
    assert held(joint, dear) < held(joint, free) and free.gap < 1e-9 and dear.gap < 1e-5


def test_the_modelled_cost_is_what_the_estimate_of_the_plan_says():
    """But for the latency of buckets, and for what lowering finds to share beyond the hubs."""
    config = transformers.LlamaConfig(
        hidden_size=1024, num_hidden_layers=2, num_attention_heads=8, intermediate_size=2816, vocab_size=8192
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).train()
        ids = torch.empty(16, 512, dtype=torch.long)
    graph = tutti.capture(model, {"input_ids": ids, "labels": ids}, torch.optim.AdamW(model.parameters()))
    planner = Planner(graph, tutti.Cluster.parse("h100:8"))
    compared = 0
    for plan in planner.ranked():
        if plan.name.startswith("auto-"):
            free = Free(planner.problem, plan.mesh, {}, {})
            chosen = Joint(planner.problem, Pricer(planner.cluster, plan.mesh), None, free).choose()
            assert chosen.cost == pytest.approx(plan.prediction.step_seconds, rel=0.02), plan.name
            compared += 1
    assert compared == 3


def test_what_runs_more_often_costs_more(graph):
    pricer = Pricer(tutti.Cluster.parse("cpu:2"), {"dp": 2})
    once = Joint(problem_of(graph), pricer).choose().cost
    often = Joint(problem_of(graph), pricer, {"forward": 3, "backward": 3}).choose().cost
    assert 2 * once < often < 3.01 * once


def test_titles_say_what_axes_do(graph):
    planner = Planner(graph, tutti.Cluster.parse("cpu:4"))
    for name, shown in (("dp", "dp4"), ("tp", "tp4"), ("zero1", "dp4xzero1"), ("zero3", "dp4xzero3"),
                        ("dp2xtp2", "dp2xtp2"), ("single", "idle4")):  # fmt: skip
        plan = planner.named(name) if name != "single" else planner.named("dp").replace(operators={}, inputs={})
        assert title(plan, planner.problem) == shown
    assert isinstance(planner.estimator, Estimator)
