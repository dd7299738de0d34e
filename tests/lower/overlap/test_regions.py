"""A step whose regions are computed in parts gives the same numbers, and what need not be in parts is not."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch

import tutti
import zoo
from cases import crossed
from tutti.ir.op_info import FLOPS
from tutti.ir.step_graph import UPDATE
from tutti.lower.collectives import COLLECTIVES, all_gather
from tutti.lower.overlap.computed_in_parts import in_parts
from tutti.lower.overlap.regions import divide
from tutti.lower.shard import shard
from tutti.plan.layouts.layout import Split
from tutti.plan.plan import Plan
from tutti.plan.planner import Planner
from tutti.plan.textbook import parse_name

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@cache
def graph(batch: int, name: str = "llama"):
    model = getattr(zoo, name)(2)
    return tutti.capture(model, zoo.tokens(batch), adam(model))


def program(batch: int, plan: str, devices: int):
    return shard(graph(batch), Planner(graph(batch), tutti.Cluster.parse(f"h100:{devices}")).named(plan), 0)


PLANS = [  # plan, devices, rows of the batch
    ("tp2xoverlap2", 2, 2), ("tp2xoverlap2", 2, 1), ("tp4xoverlap2", 4, 3), ("tp4xoverlap4", 4, 1),
    ("dp2xtp2xoverlap2", 4, 2), ("dp2xtp2xoverlap2", 4, 4), ("tp2xzero3xoverlap2", 4, 2),
    ("tp2xrecomputexoverlap2", 2, 1),
]  # fmt: skip
QUICK = [("gpt2", "tp2xrecomputexoverlap2", 2, 1)]


@pytest.mark.parametrize("name, plan, devices, batch", crossed(["llama", "gpt2"], PLANS, quick=QUICK))
def test_numbers_are_those_of_one_device(name, plan, devices, batch):
    """Also where a rank has one sequence, or three: then the sequence is cut, and not the batch."""
    model = getattr(zoo, name)(2)
    one, data = copy.deepcopy(model), zoo.tokens(batch)
    ours = tutti.parallelize(model, adam(model), data, cluster=f"h100:{devices}", plan=plan, level="O0")
    whole = tutti.parallelize(one, adam(one), data, cluster="cpu:1", plan="single", level="O0")
    gradients = ours.gradients(data)
    for key, value in whole.gradients(data).items():
        assert (gradients[key] - value).norm() <= 1e-5 * value.norm() + 1e-9, key
    for _ in range(2):
        assert ours(data).item() == pytest.approx(whole(data).item(), rel=1e-5)
    assert ours.evaluate(data).item() == pytest.approx(whole.evaluate(data).item(), rel=1e-5)
    assert {n.meta.get("copy") for n in ours.program.graph.nodes} >= set(range(int(plan[-1])))


def test_a_plan_says_that_regions_are_in_parts():
    plan = Planner(graph(2), tutti.Cluster.parse("h100:2")).named("tp2xoverlap2")
    assert plan.overlap_chunks == 2 and plan.name == "tp2xoverlap2"
    assert "computed in 2 parts" in plan.explain()
    assert Plan.from_json(plan.to_json()) == plan
    assert "- overlap_chunks: 2" in plan.diff(plan.replace(overlap_chunks=1))


def test_collectives_between_layers_are_in_parts_and_send_as_much():
    whole, parts = program(1, "tp2", 2), program(1, "tp2xoverlap2", 2)
    divide(parts)
    parts.graph.lint()
    assert parts.sent == whole.sent
    counts = [sum(c.kind == "all_reduce" and "layers" in c.label for c in p.collectives) for p in (whole, parts)]
    assert counts[1] == 2 * counts[0] > 0


@pytest.mark.parametrize("batch", [1, 4])
def test_attention_is_whole_where_the_sequence_is_cut(batch):
    """Where there are several sequences they are cut, and nothing has to be joined between layers."""
    lowered = program(batch, "tp2xoverlap2", 2)
    parts = in_parts(lowered.graph, 2)
    attention = [n for n in lowered.graph.nodes if n.target is ATTENTION]
    assert len(attention) == 2 and all((n in parts) == (batch > 1) for n in attention)
    products = [
        n for n in lowered.graph.nodes if n.target in FLOPS and n.meta["phase"] == "forward" and n not in attention
    ]
    assert all(isinstance(at, Split) and at.dim == 0 for n in products for at in parts[n].outs)


def test_gathered_pieces_of_a_sequence_are_cut_in_strides():
    """Half of what each of two ranks holds of a sequence is no half of it, but one of each of its halves."""
    step = graph(1, "gpt2")
    sharded = shard(step, Planner(step, tutti.Cluster.parse("h100:2")).named("tp2"), 0)
    parts = in_parts(sharded.graph, 2)
    gathers = [n for n in sharded.graph.nodes if n.target is all_gather and n in parts and "h.*" in n.meta["label"]]
    assert gathers and all(str(parts[n].ins[0]) == "S1" and str(parts[n].outs[0]) == "S2" for n in gathers)
    strided = [n for n in parts if n.target is torch.ops.aten.addmm.default and parts[n].outs == (Split(0, 2),)]
    assert strided, "products over tokens of a gathered sequence"


def test_what_has_no_part_in_hiding_is_left_whole():
    """Updates, gathers of parameters, and what is computed before the first communication."""
    lowered = program(2, "tp2xzero3xoverlap2", 4)
    parts = in_parts(lowered.graph, 2)
    assert all(n.meta["phase"] != UPDATE for n in parts)
    gathers = [n for n in lowered.graph.nodes if n.target in COLLECTIVES and n.meta["label"].startswith("param:")]
    assert gathers and not set(gathers) & set(parts)


def test_what_cannot_be_is_an_error():
    with pytest.raises(ValueError, match="at least 2 parts"):
        parse_name("tp2xoverlap1", 2)
    for name, other in (("pp2", "a pipeline"), ("tp2xsplits2", "copies"), ("tp2xoffload", "offload")):
        with pytest.raises(ValueError, match=f"overlap cannot be combined with {other}"):
            parse_name(f"{name}xoverlap2", 2)
    plan = Planner(graph(2), tutti.Cluster.parse("h100:2")).named("tp2xoverlap2")
    with pytest.raises(ValueError, match="which excludes tiers"):
        plan.replace(tiers={"param:lm_head.weight": "host"}).check(graph(2))


@pytest.mark.parametrize("plan", ["dp2xoverlap2", "cp2xoverlap2"])
def test_a_plan_without_regions_is_an_error(plan):
    model, batch = zoo.llama(1), zoo.tokens(2)
    step = tutti.parallelize(model, adam(model), batch, cluster="h100:2", plan=plan, level="O0")
    with pytest.raises(ValueError, match="there is no communication between"):
        step(batch)
    with pytest.raises(ValueError, match="there is no communication between"):
        _ = step.plan
