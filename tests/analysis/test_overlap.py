"""Programs whose collectives are begun early and waited for late compute the same, and waits stand where they must."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

import tutti
from cases import crossed
from models import case
from tutti.lower.collectives import COLLECTIVES, is_begun, wait
from tutti.plan.planner import Planner
from tutti.plan.textbook import parse_name
from tutti.sim.dryrun import dry_run


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def hiding(name: str) -> tutti.Cluster:
    """A cluster whose devices compute on while links are busy."""
    cluster = tutti.Cluster.parse(name)
    return replace(cluster, device=replace(cluster.device, overlaps=True))


# Ranks whose shares differ in size find different orders, and keep the one that they were given: shares of heads and of
# parameters that do not divide.
UNLIKE = {("gpt2", "tp4"), ("llama", "tp2xzero3")}
PLANS = ["dp4", "tp4", "zero3", "dp2xtp2", "tp2xzero3", "pp2xtp2", "cp4"]


@pytest.mark.parametrize("name, plan", crossed(["gpt2", "llama"], PLANS, quick=[("llama", "pp2xtp2")]))
def test_the_same_bits_as_where_each_collective_is_waited_for(name, plan):
    model, batch, loss = case(name)
    options = {"loss": loss, "plan": plan, "level": "O0", "clip_norm": 1.0, "accumulate": 2 if "pp" in plan else 1}
    one = copy.deepcopy(model)
    ours = tutti.parallelize(model, adam(model), batch, cluster=hiding("cpu:4"), **options)
    options["plan"] = ours._plan
    plain = tutti.parallelize(one, adam(one), batch, cluster="cpu:4", **options)
    for _ in range(2):
        assert ours(batch).item() == plain(batch).item()
    for key, value in plain.training_state().items():
        assert torch.equal(ours.training_state()[key], value), key
    if "pp" not in plan:
        begun = [n for n in ours.program.graph.nodes if n.target in COLLECTIVES and is_begun(n)]
        assert bool(begun) == ((name, plan) not in UNLIKE)
        assert not any(n.target is wait for n in plain.program.graph.nodes)


def test_a_causal_ring_is_predicted_as_it_runs():
    """Ranks with contiguous parts of a sequence differ, and keep the given order. Those with stripes are alike."""
    model, batch, loss = case("llama")
    graph, cluster = tutti.capture(model, batch, adam(model), loss), tutti.Cluster.parse("a100-80:4")
    planner, book = Planner(graph, cluster), parse_name("cp4", 4)
    contiguous = planner.textbook(book, stripes=False).plan()
    for plan, hides in ((contiguous, False), (planner.named("cp4"), True), (planner.named("zero3"), True)):
        waits, overlaps = (dry_run(graph, plan, cluster, "O0", overlaps=o).seconds for o in (False, True))
        assert (overlaps < waits) == hides and overlaps <= waits
