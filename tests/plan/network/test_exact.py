"""The integer program finds the optimum."""

import pytest

from networks import cheapest, random_network
from tutti.plan.network.exact import solve


@pytest.mark.parametrize("seed", range(6))
def test_the_optimum_and_its_bound(seed):
    network = random_network(seed)
    x, bound = solve(network)
    assert x is not None and network.cost(x) == pytest.approx(cheapest(network))
    assert bound == pytest.approx(cheapest(network), abs=1e-7)
