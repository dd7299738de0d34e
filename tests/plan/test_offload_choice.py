"""Where nothing fits, what costs least to keep outside of the device lies there, and no more than has to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import models
import tutti
from searches import predicted, wide
from tutti.plan.plan import Plan
from tutti.plan.search.offload import Offload, things_of
from tutti.plan.search.recompute import Activations
from tutti.plan.search.search import Search
from tutti.plan.tier import offloaded
from tutti.sim.dryrun import dry_run
from tutti.sim.planning import Simulator

CLUSTER = tutti.Cluster.parse("v100-32:2")


def search(step, memory: float) -> Search:
    tight = tutti.Cluster(replace(CLUSTER.device, memory=memory), CLUSTER.levels)
    return Search(lambda count, variant: step, 8, tight, Simulator("O0"), accumulate=1, mesh={"dp": 2}, budget=300)


def test_a_search_offloads_where_nothing_fits_and_no_more_than_it_has_to():
    step = wide(8)
    full = tutti.Cluster(replace(CLUSTER.device, memory=1), CLUSTER.levels)  # no room for an order that takes more
    large = predicted(step, full, "zero3").predicted
    searched = search(step, large.peak_bytes - large.bytes_by_kind["optimizer state"] // 10)
    searched.plans.append(searched.judgement(predicted(step, CLUSTER, "zero3")))
    Offload(searched).search()
    best = searched.best_of_all
    assert searched.fits(best) and best.tiers and set(best.tiers.values()) == {"host"}
    assert len(best.tiers) < len(offloaded(step, 3, "host")) and "on the host: " in best.explain()
    for name in ("zero3xoffload", "zero3xoffload3"):  # which keep all of a kind there
        assert best.predicted.step_seconds < predicted(step, CLUSTER, name).predicted.step_seconds
    again = dry_run(step, best, searched.cluster).prediction()
    assert again.peak_bytes == best.predicted.peak_bytes <= searched.memory
    assert Plan.from_json(best.to_json()) == best


def test_what_a_thing_is():
    step = wide(8)
    plan = predicted(step, CLUSTER, "zero3")
    things, pairs = things_of(step, plan, CLUSTER.device, Activations(step))
    by_name = {t.name: t for t in things}
    up = "model.layers.*.mlp.up_proj.weight"
    state, own = by_name[f"exp_avg:{up}\nexp_avg_sq:{up}"], by_name[f"param:{up}"]
    layers, size = 2, 2048 * 5632 * 4 // 2  # on each of two devices
    assert (state.bytes, own.bytes) == (2 * layers * size, layers * size)
    assert own.outside == 2 * layers * size / CLUSTER.device.outside.link
    at = things.index(state)
    assert pairs[at, at + 1] == layers * size / CLUSTER.device.outside.link


@pytest.mark.slow
def test_found_and_trained_under_a_budget():
    torch.manual_seed(0)
    model, batch, _ = models.mixtral()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    whole = tutti.parallelize(model, optimizer, batch, cluster="cpu:1", plan="single", level="O0", memory="1GiB")
    expected = [whole(batch).item() for _ in range(2)]
    memory = int(0.66 * whole.budgets[0].most)
    torch.manual_seed(0)
    model, batch, _ = models.mixtral()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = tutti.parallelize(model, optimizer, batch, cluster="cpu:1", level="O0", memory=memory)
    assert [step(batch).item() for _ in range(2)] == expected
    assert step.plan.tiers and step.budgets[0].most <= memory
