"""The cheapest assignment, and the proof that it is."""

import numpy as np
import pytest

import tutti.plan.network.minimize
from networks import cheapest, random_network
from tutti.plan.network.minimize import minimize
from tutti.plan.network.network import NEVER, Network


@pytest.mark.parametrize("seed", range(30))
def test_the_optimum_is_found_and_proven(seed):
    network = random_network(seed, variables=7, states=4, density=0.9)
    solution = minimize(network)
    best = cheapest(network)
    assert network.cost(solution.states) == solution.cost == pytest.approx(best)
    assert solution.bound <= best + 1e-9 and solution.gap < 1e-6


@pytest.mark.parametrize("seed", range(5))
def test_without_time_the_bound_is_still_one(seed, monkeypatch):
    monkeypatch.setattr(tutti.plan.network.minimize, "SWEEPS", 1)
    network = random_network(seed, variables=7, density=1.0)
    solution = minimize(network, seconds=0)
    best = cheapest(network)
    assert solution.bound <= best + 1e-9 <= solution.cost + 2e-9 and solution.cost == pytest.approx(
        network.cost(solution.states)
    )


def test_what_is_impossible_is_an_error():
    network = Network()
    network.add("a", np.zeros(2))
    network.add("b", np.zeros(2))
    network.join("a", "b", np.full((2, 2), NEVER))
    with pytest.raises(ValueError, match="no combination of choices is possible"):
        minimize(network)
