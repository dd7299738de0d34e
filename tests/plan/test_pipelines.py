"""The search of pipelines: where links are slow they win, where they are fast nobody tries."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

import tutti
from searches import wide
from tutti.plan.piped import Piped
from tutti.plan.plan import PIPELINE
from tutti.plan.schedule import Pipe
from tutti.plan.search import Search
from tutti.run.planning import judge
from tutti.run.simulated.dryrun import dry_run

BATCH = 32
FAST = tutti.Cluster.parse("h100:4")
SLOW = tutti.Cluster(FAST.device, ((4, replace(FAST.levels[0][1], bandwidth=2e9, latency=2e-5)),))


@cache
def graph(count: int):
    return wide(BATCH // count, layers=4)


def search(cluster: tutti.Cluster, **options) -> Search:
    return Search(graph, BATCH, cluster, judge("O0"), **{"accumulate": None, "budget": 600, **options})


@pytest.fixture(scope="module")
def slow():
    found = search(SLOW)
    found.ranked()
    return found


def test_over_slow_links_a_pipeline_is_best(slow):
    best = slow.best_of_all
    assert PIPELINE in best.mesh and best.accumulate >= 4 and slow.fits(best)
    flat = [p.predicted.step_seconds for p in slow.plans if PIPELINE not in p.mesh]
    assert best.predicted.step_seconds < 0.8 * min(flat)
    assert all(p.durations for p in slow.plans if p.schedule == "found")
    assert tutti.Plan.from_json(best.to_json()).replace(prediction=None) == best.replace(prediction=None)


def test_what_is_modelled_is_about_what_the_clock_says(slow):
    lengths = {c.pipe.devices: c.candidate for c in slow.candidates if isinstance(c, Piped)}
    assert lengths.keys() == {2, 4}
    for devices, schedule in [(2, ("interleaved", 2)), (2, ("found", 2)), (4, ("1f1b", 1)), (4, ("found", 1))]:
        candidate = Piped(lengths[devices], Pipe(devices, *schedule), SLOW)
        made = dry_run(graph(candidate.planner.accumulate), candidate.plan(), SLOW)
        assert candidate.chosen.seconds == pytest.approx(made.seconds, rel=0.15), candidate.plan().name
        assert candidate.chosen.kept < made.memory.peak


def test_where_links_are_fast_or_there_is_one_microbatch_none_is_best():
    assert PIPELINE not in search(FAST, accumulate=4).ranked()[0].mesh
    one = search(SLOW, accumulate=1)
    one.ranked()
    assert not any(PIPELINE in c.mesh for c in one.candidates)


def test_stages_hold_what_fits(slow):
    """With less memory layers move, or are kept split; what is chosen fits."""
    best = slow.best_of_all
    memory = 0.95 * best.predicted.peak_bytes
    tight = tutti.Cluster(replace(SLOW.device, memory=memory), SLOW.levels)
    made = search(tight, mesh=best.mesh, accumulate=best.accumulate, budget=20).best().predicted
    assert made.peak_bytes <= memory and made.step_seconds >= best.predicted.step_seconds / 1.02


def test_a_mesh_with_a_pipeline():
    plans = search(FAST, mesh={"pp": 2, "dp": 2}, accumulate=8).ranked(2)
    assert all(p.mesh == {"pp": 2, "dp": 2} and p.accumulate == 8 for p in plans)
    with pytest.raises(ValueError, match="cannot be cut into 16 stages"):
        search(tutti.Cluster.parse("h100:16"), mesh={"pp": 16}, accumulate=16).ranked()
