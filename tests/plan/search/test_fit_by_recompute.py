"""Where what is fast does not fit, some of it is computed again; jointly with layouts, stages and microbatches."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

import tutti
from searches import alone, predicted, wide
from tutti.lower.variants.vary import vary
from tutti.plan.search.fit_by_recompute import Smaller
from tutti.plan.search.search import Search
from tutti.plan.variant import PLAIN
from tutti.sim.dryrun import dry_run
from tutti.sim.planning import Simulator

FAST = alone("h100:4")


@cache
def graph(count: int = 1, variant=PLAIN):
    return vary(wide(8 // count), variant)


def search(memory: float, cluster: tutti.Cluster = FAST, **options) -> Search:
    tight = tutti.Cluster(replace(cluster.device, memory=memory), cluster.levels)
    return Search(graph, 8, tight, Simulator("O0"), budget=300, **options)


@pytest.mark.parametrize("name", ["dp4", "pp2xdp2"])
def test_what_does_not_fit_is_computed_again_in_part(name):
    count = 2 if name.startswith("pp") else 1
    large = predicted(graph(count), FAST, name, count)
    searched = search(large.predicted.peak_bytes - 0.5 * large.predicted.bytes_by_kind["activations"])
    Smaller(searched).shrink(searched.judgement(large))
    best = searched.best_of_all
    assert best.recompute and searched.fits(best) and list(best.mesh) == list(large.mesh)
    assert best.predicted.step_seconds < 1.25 * large.predicted.step_seconds, "a whole forward pass would be a third"
    again = dry_run(graph(count, best.variant), best, searched.cluster).prediction()
    assert again.peak_bytes == best.predicted.peak_bytes <= searched.memory
    assert "the backward pass recomputes" in best.explain()


@pytest.mark.slow
def test_a_search_computes_again_where_nothing_fits_without():
    small = alone("h100:2")
    least = predicted(graph(), small, "zero3").predicted.peak_bytes
    searched = search(0.85 * least, small, accumulate=1, mesh={"dp": 2})
    assert searched.best().recompute
    assert not any(searched.fits(plan) for plan in searched.plans if not plan.recompute)


def test_where_all_fits_nothing_is_computed_again():
    assert not search(1 << 40, mesh={"dp": 4}).best().recompute
