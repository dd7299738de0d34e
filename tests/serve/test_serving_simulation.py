"""Loads on simulated engines, and plans for them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tiny
from transformers import DeepseekV3Config, LlamaConfig

from tutti.cli.plan.serve import plan_serve
from tutti.hardware import Cluster
from tutti.serve import Engine
from tutti.serve.apart.costs import Costs, measured
from tutti.serve.apart.planning import ServingPlanner, plans, why
from tutti.serve.apart.simulate import SimulatedEngine, Sizes, simulate
from tutti.serve.bench import Arrival, poisson, report

FLAT = Costs((1, 100), (0.01, 0.01), 0.0, 0.0)  # each step takes 10 ms


def test_a_request_alone():
    (seen,) = simulate([Arrival(1.0, 40, 5)], [SimulatedEngine(Sizes(20, budget=32, most=4), FLAT)])
    assert seen.times == pytest.approx([1.02, 1.03, 1.04, 1.05, 1.06])  # the prompt takes two steps
    assert seen.good and seen.end == pytest.approx(1.06) and seen.tokens == 5


def test_costs():
    costs = Costs((1, 11), (0.1, 0.2), 0.001, 0.0001, 0.5)
    assert costs([(1, 1)]) == pytest.approx(0.5 + 0.1 + 0.001)
    assert costs([(6, 100)]) == pytest.approx(0.5 + 0.15 + 0.1)  # reading 100 tokens, more than 600 pairs
    assert costs([(20, 100)]) == pytest.approx(0.5 + 0.29 + 0.18)  # 1800 pairs


def test_two_engines_do_twice_the_work():
    load = poisson(40, 0, (30, 30), (20, 20), 0)
    slow = Costs((1, 100), (0.01, 1.0), 0.0, 0.0)
    one = report(simulate(load, [SimulatedEngine(Sizes(200), slow)]), 1, 1)
    two = report(simulate(load, [SimulatedEngine(Sizes(200), slow) for _ in range(2)]), 1, 1)
    assert two.throughput == pytest.approx(2 * one.throughput, rel=0.1)


def test_scarce_blocks_preempt_and_all_are_answered():
    engine = SimulatedEngine(Sizes(12, most=8, budget=32), FLAT)
    seen = simulate(poisson(10, 0, (20, 40), (30, 60), 0), [engine])
    assert all(x.good and x.tokens == x.arrival.tokens for x in seen)
    assert engine.scheduler.preemptions and engine.pool.used == 0


def test_disaggregated_engines_do_not_delay_tokens():
    """Prompts slow down the tokens of others where both share an engine."""
    costs = Costs((1, 32, 512), (0.01, 0.01, 0.2), 0.0, 0.0)
    load = poisson(30, 4.0, (400, 500), (30, 40), 1)
    together = report(simulate(load, [SimulatedEngine(Sizes(4000), costs) for _ in range(2)]), 9, 9)
    engines = [SimulatedEngine(Sizes(4000), costs, True)], [SimulatedEngine(Sizes(4000), costs)]
    apart = report(simulate(load, *engines, lambda tokens: 0.001), 9, 9)
    assert apart.answered == together.answered == 30
    assert apart.itl["p99"] < 0.5 * together.itl["p99"]
    assert engines[0][0].pool.used == engines[1][0].pool.used == 0


def test_measured_costs_are_of_this_engine():
    engine = Engine(tiny.model(), plan="single", blocks=32, budget=64, most=4)
    costs = measured(engine, 1)
    assert costs.tokens == (1, 2, 4, 8, 16, 24, 32, 48, 64) and all(x > 0 for x in costs.seconds)
    engine.generate(tiny.prompts(9))  # nothing was written where it reads
    assert engine.pool.used == 0


def test_plans_of_a_cluster():
    assert dict(plans(4)) == {"single": 1, "tp2": 2, "pp2": 2, "tp4": 4, "pp2xtp2": 4, "pp4": 4}


@pytest.mark.parametrize("config", [
    LlamaConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=8,
                num_key_value_heads=4, vocab_size=8192),
    pytest.param(DeepseekV3Config(
        hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=8, vocab_size=1024,
        num_key_value_heads=8, n_routed_experts=16, num_experts_per_tok=4, moe_intermediate_size=128, n_group=1,
        topk_group=1, first_k_dense_replace=1), marks=pytest.mark.slow),
])  # fmt: skip
def test_placements(config, tmp_path, capsys):
    planner = ServingPlanner(config, Cluster.parse("h100:2"), 256, 16)
    outcomes = planner.outcomes(poisson(20, 20.0, (20, 200), (5, 20), 0), 0.5, 0.05)
    names = [str(x.placement) for x in outcomes]
    assert {"2 x single", "1 x tp2", "prompts 1 x single, generation 1 x single"} <= set(names)
    assert outcomes[0].report.goodput == pytest.approx(max(x.report.goodput for x in outcomes), rel=1e-3)
    assert "disaggregation" in why(outcomes)
    # depth and weights follow from two captured depths
    deep = planner.predicted.on("single", Cluster.parse("h100:1"))
    with_all = sum(p.numel() * 2 for p in planner.predicted._model(config.num_hidden_layers).parameters())
    assert deep.weights == pytest.approx(with_all, rel=0.02)


def test_the_verb(tmp_path, capsys):
    LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, vocab_size=1024,
                architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)  # fmt: skip
    plan_serve(str(tmp_path), "h100:2", requests=10, save=tmp_path / "found.json")
    printed = capsys.readouterr().out
    lines = {line.strip().partition("  ")[0]: line for line in printed.splitlines()}
    assert "100 %" in lines["2 x single"] and "100 %" in lines["prompts 1 x single, generation 1 x single"]
    assert (
        "TTFT, ms" in printed and "cost" not in printed and "1 of the 2 devices do about as well: 1 x single" in printed
    )
    best = json.loads((tmp_path / "found.json").read_text())[0]
    assert best["answered"] == 10
    period = re.search(
        r"a second: over the (\S+) s from .*; 10 requests arrived within (\S+) s, (\S+) a second", printed
    )
    seconds, within, rate = map(float, period.groups())
    assert seconds == pytest.approx(best["seconds"], rel=0.01) and within < seconds
    assert rate == pytest.approx(10 / within, rel=0.01) and best["goodput"] < rate
    plan_serve(str(tmp_path), "h100:2", requests=10, search_seconds=1e-9, price=2.0)
    output = capsys.readouterr()
    assert "2 x single: 100 % in time" in output.err, "placements are told as they are found"
    row = next(line for line in output.out.splitlines() if line.strip().startswith("2 x single")).split()
    throughput, cost = float(row[5].replace(",", "")), float(row[-1])
    assert cost == pytest.approx(2 * 2.0 / 3600 / throughput * 1e6, rel=0.01)
    assert "3 other placements were left out" in output.out


@pytest.mark.parametrize("change, message", [
    ({"model": "nowhere"}, "there is no model 'nowhere': give a folder with a transformers config.json"),
    ({"config": {"model_type": "t5"}}, "T5Config is not served: "),
    ({"config": {"model_type": "nothing"}}, "config.json is not a transformers config: "),
    ({"rate": -1.0}, "--rate -1: 0 or more"), ({"prompt": (5, 2)}, "--prompt 5 2: the smallest number of tokens"),
    ({"tokens": (0, 2)}, "--tokens 0 2"), ({"requests": 0}, "--requests 0: at least 1"), ({"ttft": 0.0}, "--ttft 0"),
    ({"search_seconds": float("nan")}, "--search-seconds nan: above 0"), ({"price": -1.0}, "--price -1"),
    ({"trace": '{"at": 0, "prompt": "text", "tokens": 1}'}, "whose prompts are numbers of tokens"),
    ({"trace": ""}, "a load to simulate has requests"), ({"save": Path("/nowhere/x.json")}, "no folder /nowhere"),
])  # fmt: skip
def test_mistakes_are_named(tmp_path, change, message):
    options = {"model": str(tmp_path), "cluster": "h100:1", **change}
    (tmp_path / "config.json").write_text(json.dumps(options.pop("config", {"model_type": "llama"})))
    if "trace" in options:
        options["trace_file"] = tmp_path / "trace.jsonl"
        options["trace_file"].write_text(options.pop("trace"))
    with pytest.raises(ValueError, match=re.escape(message)):
        plan_serve(**options)


def test_costs_between_and_beyond_the_sizes_that_are_known():
    costs = Costs((1, 11, 31), (0.1, 0.2, 0.3), 0.0, 0.0)
    for total, expected in ((1, 0.1), (6, 0.15), (11, 0.2), (21, 0.25), (31, 0.3), (51, 0.4)):
        assert costs([(total, 0)]) == pytest.approx(expected)
    assert Costs((4,), (0.1,), 0.0, 0.0)([(9, 0)]) == 0.1
