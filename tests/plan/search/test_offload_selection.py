"""Cuts and placements are those of trying everything."""

import random
from itertools import chain, combinations

import pytest

from tutti.plan.search.offload_selection import Thing, cost, cut, place


def drawn(seed):
    draw = random.Random(seed)
    n = draw.randint(1, 9)
    things = [Thing(f"t{i}", draw.randint(1, 40), draw.random(), draw.choice((0.0, draw.random()))) for i in range(n)]
    pairs = {(i, j): draw.random() for i in range(n) for j in range(n) if i != j and draw.random() < 0.3}
    return things, pairs, draw


def every(n):
    return map(set, chain.from_iterable(combinations(range(n), k) for k in range(n + 1)))


@pytest.mark.parametrize("seed", range(30))
def test_a_cut_is_the_cheapest_placement(seed):
    things, pairs, draw = drawn(seed)
    for price in (0.0, 0.05 * draw.random(), draw.random()):
        priced = [Thing(t.name, t.bytes, t.outside, t.inside + price * t.bytes) for t in things]
        best = min(cost(priced, pairs, away) for away in every(len(things)))
        assert cost(priced, pairs, cut(things, pairs, price)) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("seed", range(30))
def test_the_cheapest_that_frees_enough(seed):
    things, pairs, draw = drawn(seed)
    total = sum(t.bytes for t in things)
    for wanted in (0, draw.randint(0, total), total):
        enough = [away for away in every(len(things)) if sum(things[i].bytes for i in away) >= wanted]
        chosen = place(things, pairs, wanted)
        assert sum(things[i].bytes for i in chosen) >= wanted
        assert cost(things, pairs, chosen) == pytest.approx(min(cost(things, pairs, a) for a in enough), rel=1e-6)


def test_all_is_outside_where_that_is_not_enough():
    things, pairs, _ = drawn(3)
    assert place(things, pairs, 10**9) == set(range(len(things))) and place([], {}, 5) == set()
