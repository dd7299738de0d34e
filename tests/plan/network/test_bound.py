"""The dual bound is one, rises, and says what can be dropped."""

from itertools import pairwise

import pytest

from networks import cheapest, random_network
from tutti.plan.network.bound import Dual


def swept(network, times):
    dual = Dual.of(network)
    for i in range(times):
        dual.sweep(backwards=i % 2 == 1)
    return dual


@pytest.mark.parametrize("seed", range(10))
def test_the_bound_rises_and_stays_below_the_optimum(seed):
    network = random_network(seed)
    best, dual = cheapest(network), Dual.of(network)
    bounds = [dual.bound]
    for i in range(20):
        dual.sweep(backwards=i % 2 == 1)
        bounds.append(dual.bound)
    assert all(b >= a - 1e-9 for a, b in pairwise(bounds))
    assert bounds[0] < bounds[-1] <= best + 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_costs_move_but_no_assignment_changes_its_cost(seed):
    network = random_network(seed, never=0)
    dual = swept(network, 7)
    for state in range(3):
        x = {name: state % len(costs) for name, costs in network.unary.items()}
        moved = sum(dual.unary[v][x[v]] for v in x) + sum(both[x[u], x[v]] for (u, v), both in dual.pairs.items())
        assert moved == pytest.approx(network.cost(x))


@pytest.mark.parametrize("seed", range(5))
def test_no_assignment_with_a_state_costs_less_than_is_said(seed):
    network = random_network(seed, variables=5)
    dual = swept(network, 10)
    for name, least in dual.least().items():
        for state, low in enumerate(least):
            fixed = network.restricted({name: [state]})  # pyright: ignore[reportArgumentType]
            assert low <= cheapest(fixed) + 1e-9
