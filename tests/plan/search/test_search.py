"""The search: what is judged, what is left out, microbatches, meshes that are given, time."""

from __future__ import annotations

from dataclasses import replace

import pytest

import tutti
from cases import slow
from searches import alone, predicted, search, wide
from tutti.lower.variants.vary import vary
from tutti.plan.explain import seconds
from tutti.plan.layouts.layout import devices
from tutti.plan.plan import Plan
from tutti.plan.search.reasons import difference
from tutti.plan.search.search import NEAR, Search
from tutti.sim.planning import Simulator

CLUSTER = alone("h100:4")


@pytest.fixture(scope="module")
def graph():
    return wide()


def with_memory(memory: float, cluster: tutti.Cluster = CLUSTER) -> tutti.Cluster:
    return tutti.Cluster(replace(cluster.device, memory=memory), cluster.levels)


@pytest.mark.slow
def test_what_fits_comes_by_time_and_every_other_mesh_is_slower(graph):
    lines = []
    searched = search(graph, CLUSTER, progress=lines.append)
    plans = searched.ranked(6)
    times = [p.predicted.step_seconds for p in plans]
    assert len(plans) >= 6 and times == sorted(times)
    assert any(p.name.startswith("auto-") for p in plans[:2])
    assert {"dp4", "tp4"} & {p.name for p in plans}, "the textbook, to compare with"
    assert all(searched.fused * c.bound > times[0] / NEAR for c in searched.candidates if id(c) not in searched.judged)
    assert "mesh dp 2 x tp 2 (2 of 2)" in lines and f"simulating {plans[0].name}, 1 microbatch" in lines
    best = search(graph, CLUSTER).best()
    assert best.name.removeprefix("auto-") == plans[0].name.removeprefix("auto-") and best.reasons[0].startswith(
        "chosen "
    )
    assert best.graph == graph.fingerprint and best.cluster == "h100:4"


def test_a_plan_is_judged_once(graph):
    judged = []

    def counting(graph, plan, cluster):
        judged.append(plan)
        return Simulator("O0")(graph, plan, cluster)

    searched = search(graph, CLUSTER)
    searched.judge = counting
    searched.ranked(8)
    keys = [(str(p.mesh), str(p.inputs), str(p.operators)) for p in judged]
    assert len(keys) == len(set(keys)) == len(searched.plans)


@pytest.mark.slow
def test_the_tightest_memory_that_is_met(graph):
    """Down to what ZeRO-3 takes, plans fit, and the less memory there is the slower they are."""
    free = search(graph, CLUSTER, budget=600).best().predicted
    least = predicted(graph, CLUSTER, "zero3").predicted.peak_bytes
    assert least < 0.9 * free.peak_bytes
    before = free.step_seconds
    for share in (0.6, 0.3, 0.05):
        memory = least + share * (free.peak_bytes - least)
        tight = search(graph, with_memory(memory), budget=600).best().predicted
        assert tight.peak_bytes <= memory and tight.step_seconds >= before / NEAR
        before = tight.step_seconds


@pytest.mark.slow
def test_as_few_microbatches_as_fit():
    graphs = {n: wide(16 // n) for n in (1, 2, 4, 8, 16)}
    one = {n: predicted(graphs[n], CLUSTER, "zero3", n).predicted.peak_bytes for n in graphs if n <= 4}
    assert one[2] < 0.8 * one[1]

    def best(memory: float, accumulate: int | None = None) -> Plan:
        return Search(
            lambda n, variant: vary(graphs[n], variant),
            16,
            with_memory(memory),
            Simulator("O0"),
            accumulate=accumulate,
            mesh={"dp": 4},
            budget=600,
        ).best()

    assert best(2 * one[1]).accumulate == 1
    tight = best(0.95 * one[1])
    assert (tight.accumulate in (2, 4) or tight.recompute) and tight.predicted.peak_bytes <= 0.95 * one[1]
    with pytest.raises(ValueError, match="or more microbatches than 1 per update, or a smaller batch"):
        best(0.5 * one[1], accumulate=1)


def test_a_mesh_that_is_given(graph):
    plans = search(graph, CLUSTER, mesh={"x": 2, "y": 2}).ranked(4)
    assert all(p.mesh == {"x": 2, "y": 2} for p in plans)
    with pytest.raises(ValueError, match="the mesh dp 3 has 3 devices, h100:4 has 4"):
        search(graph, CLUSTER, mesh={"dp": 3})


@pytest.mark.parametrize("count", [7, slow(12)])
def test_awkward_numbers_of_devices(count):
    plan = search(wide(14), with_memory(1e12, tutti.Cluster.parse(f"cpu:{count}"))).best()
    assert devices(plan.mesh) == count and plan.operators


@pytest.mark.slow
def test_meshes_of_three_axes_are_looked_at_while_there_is_time(graph):
    searched = search(graph, "h100:2x4", budget=600)
    searched.ranked()
    assert {"dp": 2, "cp": 2, "tp": 2} in [c.mesh for c in searched.candidates]
    hurried = search(graph, "h100:2x4", budget=0.0)
    best = hurried.best()
    assert all(len(c.mesh) < 3 for c in hurried.candidates) and hurried.left > 0
    assert any("skipped, because their share of the budget was spent: " in reason for reason in best.reasons)


def test_a_difference_is_that_of_two_simulations(graph):
    one, other = (predicted(graph, CLUSTER, name) for name in ("dp", "tp"))
    a, b = one.predicted, other.predicted
    back, forth = difference(other, one), difference(one, other)
    assert back == forth.translate(str.maketrans("+-", "-+")) and forth[0] == "+-"[b.step_seconds < a.step_seconds]
    assert forth.startswith(f"+{seconds(b.step_seconds - a.step_seconds)} a step")
