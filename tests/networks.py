"""Random cost networks, and the cheapest assignment by trying all."""

from __future__ import annotations

from itertools import product
from random import Random

import numpy as np

from tutti.plan.network.network import NEVER, Network


def random_network(seed: int, variables: int = 6, states: int = 4, density: float = 0.6, never: float = 0.1) -> Network:
    """Some pairs are joined; some combinations of theirs are impossible, never all of them."""
    rng, numbers = Random(seed), np.random.default_rng(seed)
    network = Network()
    names = [f"v{i}" for i in range(variables)]
    for name in names:
        network.add(name, numbers.uniform(0, 1, rng.randint(1, states)))
    possible = {name: rng.randrange(len(network.unary[name])) for name in names}
    for i, u in enumerate(names):
        for v in names[:i]:
            if rng.random() < density:
                costs = numbers.uniform(0, 1, (len(network.unary[u]), len(network.unary[v])))
                forbidden = numbers.uniform(size=costs.shape) < never
                forbidden[possible[u], possible[v]] = False
                costs[forbidden] = NEVER
                network.join(u, v, costs)
    return network


def cheapest(network: Network) -> float:
    names = list(network.unary)
    states = product(*(range(len(network.unary[name])) for name in names))
    return min(network.cost(dict(zip(names, x, strict=True))) for x in states)
