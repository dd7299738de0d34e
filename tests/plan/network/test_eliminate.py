"""Elimination keeps the optimum."""

from itertools import pairwise

import numpy as np
import pytest

from networks import cheapest, random_network
from tutti.plan.network.eliminate import eliminate, improve, min_plus
from tutti.plan.network.network import Network


@pytest.mark.parametrize("seed", range(12))
def test_the_optimum_of_the_core_is_that_of_the_whole(seed):
    network = random_network(seed, density=0.3 + 0.05 * seed)
    smaller = eliminate(network)
    names = list(smaller.core.unary)
    assert all(len(smaller.core.pairs[name]) > 2 for name in names)
    if names:
        best = cheapest(smaller.core)
        states = [np.arange(len(smaller.core.unary[name])) for name in names]
        grid = np.stack([g.ravel() for g in np.meshgrid(*states, indexing="ij")], 1)
        x = min(({n: int(s) for n, s in zip(names, row, strict=True)} for row in grid), key=smaller.core.cost)
        assert smaller.core.cost(x) == best
    else:
        x = {}
    whole = smaller.extend(x)
    assert set(whole) == set(network.unary)
    assert network.cost(whole) == pytest.approx(cheapest(network))


def test_a_chain_is_eliminated_whatever_its_length():
    network, rng = Network(), np.random.default_rng(0)
    for i in range(50):
        network.add(f"v{i}", rng.uniform(size=3))
        if i:
            network.join(f"v{i - 1}", f"v{i}", rng.uniform(size=(3, 3)))
    smaller = eliminate(network)
    total = network.unary["v0"]
    for i in range(1, 50):  # Viterbi
        total = (total[:, None] + network.pairs[f"v{i - 1}"][f"v{i}"]).min(0) + network.unary[f"v{i}"]
    assert not smaller.core.unary and network.cost(smaller.extend({})) == pytest.approx(total.min())


def test_what_is_left_without_neighbours_is_counted():
    network = Network()
    network.add("a", np.array([3.0, 2.0]))
    network.add("b", np.array([5.0]))
    assert eliminate(network).constant == 7.0


@pytest.mark.parametrize("seed", range(8))
def test_improving_never_makes_it_dearer_and_finds_the_best_in_some_tries(seed):
    network, draw = random_network(seed, variables=7, density=0.8), np.random.default_rng(seed)
    x = dict.fromkeys(network.unary, 0)
    costs = [network.cost(x)]
    for _ in range(12):
        x = improve(network, x, draw)
        costs.append(network.cost(x))
    assert all(b <= a + 1e-9 for a, b in pairwise(costs))
    assert costs[-1] == pytest.approx(cheapest(network))


def test_without_what_is_fixed_improving_is_exact():
    network = random_network(2, density=0.2)
    x = improve(network, dict.fromkeys(network.unary, 0), np.random.default_rng(0))
    assert network.cost(x) == pytest.approx(cheapest(network))


def test_min_plus_is_what_it_says():
    a, b = np.random.default_rng(1).uniform(size=(4, 5)), np.random.default_rng(2).uniform(size=(5, 3))
    assert np.array_equal(min_plus(a, b), (a[:, :, None] + b[None]).min(1))
