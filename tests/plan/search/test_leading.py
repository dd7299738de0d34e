"""The named plans of a search: what leads fits, is found again, and is no slower than what a person would name."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import tutti
from searches import alone, predicted, wide
from tutti.lower.variants.vary import vary
from tutti.plan.layouts.reshard import sent_bytes
from tutti.plan.pipeline.schedule import Pipe
from tutti.plan.pipeline.slots import in_flight
from tutti.plan.plan import Plan
from tutti.plan.search import leading
from tutti.plan.search.estimate import WHOLE, Columns, Inner, most_in_flight
from tutti.plan.search.kind import kind, kind_of
from tutti.plan.search.leading import Leading
from tutti.plan.search.search import NEAR, Search
from tutti.plan.textbook import Textbook
from tutti.sim.planning import Simulator

CLUSTER, BATCH = alone("h100:4"), 16
step = cache(lambda count: wide(BATCH // count, length=256))


def tight(share: float, steps=step, batch: int = BATCH, **options) -> Search:
    """A search with so much of the memory that ZeRO-3 takes with a single microbatch."""
    memory = share * whole(steps).predicted.peak_bytes
    small = tutti.Cluster(replace(CLUSTER.device, memory=memory), CLUSTER.levels)
    return Search(lambda count, variant: vary(steps(count), variant), batch, small, Simulator("O0"),
                  **{"accumulate": None, **options})  # fmt: skip


@cache
def whole(steps) -> Plan:
    return predicted(steps(1), CLUSTER, "zero3")


def led() -> Search:
    search = tight(0.85)
    search.lead()
    return search


first_led = cache(led)


def test_named_plans_are_not_needed_where_memory_is_plenty():
    assert not Leading(tight(10)).needed and Leading(tight(0.3)).needed


def test_pipelines_come_first_until_a_plan_of_a_large_step_fits(monkeypatch):
    monkeypatch.setattr(leading, "LARGE", 0)
    monkeypatch.setattr(leading, "STAGES", 2)
    monkeypatch.setattr(leading, "FIRST", 10.0)
    named_plans = Leading(tight(10))
    assert named_plans.large and named_plans.needed
    named_plans.begin()
    while not named_plans.outlined[i := named_plans.next()]:
        named_plans.look_at(i)
    book, count = named_plans.entries[i]
    assert book.pipe.stages >= 2
    named_plans.of.judgement(named_plans.of.planner(count, book.variant).named(str(book)))
    assert named_plans.entries[named_plans.next()][0].pipe.devices == 1


@pytest.mark.slow
def test_what_leads_fits_and_is_no_slower_than_a_named_plan():
    search = first_led()
    assert search.fastest is not None
    named = [predicted(step(4), CLUSTER, name, 4) for name in ("zero3", "zero1", "tp4")]
    fitting = [p.predicted.step_seconds for p in named if search.fits(p)]
    assert fitting and search.fastest <= NEAR * min(fitting)


def test_the_same_request_finds_the_same_plans():
    one, other = first_led(), led()
    assert [p.to_json() for p in one.plans] == [p.to_json() for p in other.plans]
    assert one.work.seconds == other.work.seconds > 0


def test_estimates_are_near_what_is_simulated():
    leading = Leading(tight(0.85))
    for book, count in leading.entries:
        if str(book) in ("dp4xzero3", "dp2xtp2xzero1") and count in (1, 4):
            plan = predicted(step(count), CLUSTER, str(book), count).predicted
            estimate = leading.estimator.of(Columns.of([(book, count)]))
            assert estimate.bytes[0] == pytest.approx(plan.peak_bytes, rel=0.5), (book, count)


def test_a_mesh_without_an_outline_takes_after_one_with_the_same_axes():
    estimator = Leading(tight(0.85)).estimator
    bound = estimator.outline(Inner(1, 1, 2))
    assert estimator.alike(Inner(1, 1, 2)) is None and bound.layers.sent > 0
    assert (
        estimator.refine(Inner(1, 1, 4))
        and estimator.alike(Inner(1, 1, 2)) == Inner(1, 1, 4)
        and estimator.alike(Inner(2, 1, 1)) is None
    )
    taken, refined = estimator.outline(Inner(1, 1, 2)), estimator.outline(Inner(1, 1, 4))
    ideal = estimator.outlines[WHOLE].split(4, 4)
    assert taken.layers.forward / bound.layers.forward == pytest.approx(
        max(1.0, refined.layers.forward / ideal.layers.forward)
    )
    assert taken.layers.sent > 0


def test_devices_that_stand_still_while_they_communicate_wait_for_all_of_it():
    """ZeRO-3 gathers parameters twice and scatters gradients in each microbatch, whatever there is to compute."""
    estimator, size = Leading(tight(0.85)).estimator, 1 << 28
    scatter = estimator.cluster.time("reduce_scatter", sent_bytes("reduce_scatter", size, 4), 1, 4)
    gather = estimator.cluster.time("all_gather", sent_bytes("all_gather", size // 4, 4), 1, 4)
    book = Textbook(dp=4, zero=3)
    plans, zero = Columns.of([(book, 3), (replace(book, recompute=True), 3)]), np.zeros(2)
    for computing in (0.0, 100.0):
        waits = estimator.reduced(plans, zero + size, zero, zero + computing)
        assert waits == pytest.approx([3 * (scatter + 2 * gather), 3 * (scatter + 3 * gather)], rel=1e-12)


def test_a_search_goes_on_after_a_judgement_until_the_budget_is_spent(monkeypatch):
    leading, judged = Leading(tight(0.85)), []
    monkeypatch.setattr(leading, "judge", judged.append)
    monkeypatch.setattr(leading.of, "affords", lambda *_: len(judged) < 3)
    flat = np.flatnonzero(leading.flat)[:4].tolist()
    monkeypatch.setattr(leading, "next", lambda: next((i for i in flat if leading.open[i]), None))
    monkeypatch.setattr(leading, "begin", lambda: None)
    for i in flat:
        leading.estimator.outlines.setdefault(Inner.of(leading.entries[i][0]), leading.estimator.outlines[WHOLE])
    leading.search()
    assert judged == flat[:3] and not leading.open[flat].any()


def test_plans_that_the_budget_does_not_allow_to_judge_are_passed_over(monkeypatch):
    leading, judged = Leading(tight(0.85)), []
    leading.begin()
    monkeypatch.setattr(leading, "judge", judged.append)
    monkeypatch.setattr(leading.of, "affords", lambda count, variant, share: share < 1)
    flat, piped = (int(np.flatnonzero(leading.stages == n)[0]) for n in (1, leading.stages.max()))
    leading.outlined[:] = True
    leading.estimator.outlines.update((inner, leading.estimator.outlines[WHOLE]) for inner in leading.inside)
    leading.look_at(flat)
    assert not judged and not leading.open[leading.stages == 1].any() and leading.open[piped]
    monkeypatch.setattr("tutti.plan.search.leading.UNLIKE", 0.5)
    leading.look_at(piped)
    assert judged == [piped] and not leading.open[piped]


def test_the_fullest_device_of_a_pipeline_counts():
    estimator = Leading(tight(0.85)).estimator
    estimator.block = 1

    def fullest(depth: int, *pipes: Pipe, last: float = 0.0) -> tuple[list[float], list[float]]:
        plans, one = Columns.of([(Textbook(pipe=pipe), 8) for pipe in pipes]), np.ones(len(pipes))
        share, seconds = estimator.fullest(depth, plans, one, last * one)
        return share.tolist(), seconds.tolist()

    assert fullest(8, Pipe(4), Pipe(1), Pipe(2)) == ([0.25, 1.0, 0.5], [2.0, 8.0, 4.0])
    assert fullest(7, Pipe(4), last=1.0) == ([2 / 7], [2.0])  # the last has one layer and what follows the layers
    assert fullest(10, Pipe(4)) == ([0.3], [3.0])
    (uneven, even) = fullest(12, Pipe(4, "interleaved", 2), Pipe(4, "interleaved", 3))[1]
    assert uneven > even == pytest.approx(3.0)


@pytest.mark.parametrize(
    "pipe", [Pipe(4), Pipe(4, "interleaved", 3), Pipe(6, "zb-v", 2), Pipe(2, "interleaved", 2)], ids=str
)
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_microbatches_in_flight_are_those_of_the_schedule(pipe, rounds):
    microbatches = [sum(each) / pipe.chunks for each in in_flight(pipe.of(rounds * pipe.devices))]
    plans = Columns.of([(Textbook(pipe=pipe), rounds * pipe.devices)])
    assert np.concatenate(most_in_flight(plans)) == pytest.approx([max(microbatches), microbatches[-1]])


def test_recomputation_of_attention_and_sequence_parallel_residuals_trade_time_for_memory():
    estimator = Leading(tight(0.85)).estimator
    assert estimator.refine(Inner(tp=4)) and estimator.refine(Inner(tp=4, sp=True))
    attention = Textbook(tp=4, recompute=True, again=("attention",))
    plans = Columns.of([(Textbook(tp=4), 4), (attention, 4), (Textbook(tp=4, recompute=True), 4)])
    estimates, residuals = estimator.of(plans), estimator.of(Columns.of([(Textbook(tp=4, sp=True), 4)]))
    assert (np.diff(estimates.seconds) > 0).all()
    assert (np.diff(estimates.kinds["activations"]) < 0).all()
    assert residuals.kinds["activations"][0] <= estimates.kinds["activations"][0]


@pytest.mark.slow
def test_where_nothing_fits_the_message_says_what_the_leanest_needs_and_what_would_do():
    with pytest.raises(ValueError) as failed:
        tight(0.01, budget=5.0).best()
    said = str(failed.value)
    assert "the smallest, " in said and "parameters" in said
    assert "named plans for h100:4 is estimated to need less" in said
    assert "or devices with " in said


def test_kinds_differ_by_forms_of_parallelism_not_by_sizes():
    plan = predicted(step(1), CLUSTER, "zero3")
    more = plan.replace(name="zero3xoverlap2", accumulate=4)
    assert kind(plan) == kind(more)
    assert kind(plan) != kind(plan.replace(name="dp4xzero1"))
    assert kind(plan) == kind(plan.replace(name="auto-dp4xzero3"))
    assert kind(plan) == kind_of(Textbook(4, zero=3)) != kind_of(Textbook(4, zero=3, recompute=True))


def test_a_plan_of_another_kind_is_judged_too():
    search = tight(1.1, cache(lambda count: wide(8 // count, length=64)), 8, accumulate=2)
    best = search.best(top=2)
    others = [p for p in search.plans if search.fits(p) and kind(p) != kind(best)]
    assert others
    second = min(others, key=search.rank)
    assert any(reason.startswith(f"runner-up {second.name}: ") for reason in best.reasons)
