"""The number of microbatches of a named plan, and what is said if it does not fit."""

import re
from dataclasses import replace

import pytest

import tutti
from searches import alone, search, wide
from tutti.plan.search.microbatches import Guess, best, guesses, named
from tutti.plan.search.remedies import GENERAL, remedies
from tutti.plan.textbook import parse_name

CLUSTER = alone("h100:4")


@pytest.fixture(scope="module")
def graphs():
    return {count: wide(batch=16 // count, layers=4) for count in (1, 2, 4, 8, 16)}


def searched(graphs, memory: float = 80 * 2**30, **options):
    from tutti.lower.variants.vary import vary

    device = replace(CLUSTER.device, memory=memory)
    searcher = search(graphs[1], tutti.Cluster(device, CLUSTER.levels), accumulate=None, **options)
    searcher.graph_of = lambda count, variant: vary(graphs[count], variant)
    return searcher


def test_the_fastest_that_fits_else_the_smallest():
    numbers = [Guess(1, 9, 30), Guess(2, 5, 20), Guess(4, 3, 10), Guess(8, 4, 5)]
    assert best(numbers, 25).count == 4 and best(numbers, 7).count == 8 and best(numbers, 1).count == 8
    assert best(numbers, 100).count == 4 and best([], 1) is None


def test_a_pipeline_has_the_number_of_microbatches_that_is_fastest(graphs):
    chosen = named(searched(graphs), "pp4")
    times = {n: named(_fixed(graphs, n), "pp4").predicted.step_seconds for n in (4, 8, 16)}
    assert chosen.accumulate > 4 and chosen.predicted.step_seconds <= 1.02 * min(times.values())


def _fixed(graphs, count):
    searcher = searched(graphs)
    searcher.accumulate = count
    return searcher


def test_what_does_not_fit_has_more_microbatches(graphs):
    one = named(_fixed(graphs, 1), "dp4").predicted
    state = one.peak_bytes - one.bytes_by_kind["activations"]
    searcher = searched(graphs, state + 0.6 * one.bytes_by_kind["activations"])
    plan = named(searcher, "dp4")
    assert searcher.fits(plan) and plan.accumulate > 1
    assert named(searched(graphs, 1.2 * one.peak_bytes), "dp4").accumulate == 1


def test_faster_numbers_are_tried_if_memory_was_overestimated(graphs, monkeypatch):
    one = named(_fixed(graphs, 1), "dp4").predicted

    def overestimated(searcher, book):
        return [replace(guess, bytes=3 * guess.bytes) for guess in guesses(searcher, book)]

    monkeypatch.setattr("tutti.plan.search.microbatches.guesses", overestimated)
    searcher = searched(graphs, 1.2 * one.peak_bytes)
    plan = named(searcher, "dp4")
    assert plan.accumulate == 1 and len({other.accumulate for other in searcher.plans}) > 1


def test_a_plan_that_does_not_fit_names_ones_that_do(graphs):
    one = named(_fixed(graphs, 1), "dp4").predicted
    searcher = searched(graphs, 0.6 * (one.peak_bytes - one.bytes_by_kind["activations"]))
    plan = named(searcher, "dp4")
    assert not searcher.fits(plan)
    said = remedies(searcher, plan)
    offered = re.findall(r"--plan (\S+) --accumulate (\d+) \(", said)
    assert said.startswith("estimated to fit: --plan dp4xzero3 --accumulate ")
    assert re.search(r"--cluster h100:(8|16) --plan dp\1xzero1 --accumulate ", said)
    name, count = offered[0][0], int(offered[0][1])
    fixed = searched(graphs, searcher.memory)
    fixed.accumulate = count
    assert fixed.fits(named(fixed, name))
    assert remedies(searcher, plan.replace(name="auto-dp4")) == GENERAL


def test_estimates_are_of_numbers_that_divide_the_batch(graphs):
    searcher = searched(graphs)
    assert [guess.count for guess in guesses(searcher, parse_name("dp4", 4))] == [1, 2, 4]
    memory = [guess.bytes for guess in guesses(searcher, parse_name("pp4", 4))]
    assert memory == sorted(memory, reverse=True) and len(memory) == 5
