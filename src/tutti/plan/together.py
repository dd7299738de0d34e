"""Functions that share stored tensors, planned together: the layouts of what they share minimise the weighted sum.

Each function is a cost network of its own (`plan.sharding_problem`). The networks stand side by side, their costs times
weights, and a pair joins the variables of a shared input: states in which it lies differently are impossible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tutti.plan.layout import Layout
from tutti.plan.minimize import minimize
from tutti.plan.network import NEVER, Network
from tutti.plan.plan import Plan
from tutti.plan.planner import Candidate


@dataclass(frozen=True)
class Together:
    """plans: of each function. cost: the weighted sum of their modelled seconds. bound: no other layouts cost less."""

    plans: list[Plan]
    cost: float
    bound: float


def plan_together(
    candidates: Sequence[Candidate],
    weights: Sequence[float],
    stored: Sequence[Mapping[str, str]],
    seconds: float = 60.0,
    given: Mapping[str, Layout] | None = None,
) -> Together:
    """The cheapest plans on one mesh in which shared inputs lie alike.

    candidates: of each function, all on one mesh. weights: how often each runs. stored: of each function, the names of
    its stored inputs with their labels in its graph. given: layouts, by name, that are taken for granted.

    Raises ValueError where no layout suits all functions.
    """
    network = Network()
    for i, (candidate, weight) in enumerate(zip(candidates, weights, strict=True)):
        own = candidate.joint.network
        for name, costs in own.unary.items():
            network.add(_name(i, name), np.minimum(weight * costs, NEVER))
        for u, v in own.edges():
            network.join(_name(i, u), _name(i, v), np.minimum(weight * own.pairs[u][v], NEVER))
    first: dict[str, tuple[int, str]] = {}
    tied: set[tuple[int, str, int, str]] = set()
    for j, labels in enumerate(stored):
        for name, label in labels.items():
            i, other = first.setdefault(name, (j, label))
            if (i, other) != (j, label) and (i, other, j, label) not in tied:
                tied.add((i, other, j, label))
                network.join(_name(i, other), _name(j, label), _alike(candidates[i], other, candidates[j], label))
            if name in (given or {}):
                lies = [layout == (given or {})[name] for layout in candidates[j].layouts(label)]
                network.add(_name(j, label), np.where(lies, 0.0, NEVER))
    solution = minimize(network, seconds)
    plans = []
    for i, candidate in enumerate(candidates):
        joint = candidate.joint
        states = {name: solution.states[_name(i, name)] for name in joint.network.unary}
        choices = {label: dict(options.choices[states[label]]) for label, options in joint.options.items()}
        cost = joint.network.cost(states)
        chosen = replace(candidate.chosen, choices=choices, states=states, cost=cost, seconds=cost)
        plans.append(candidate.plan(chosen))
    return Together(plans, solution.cost, solution.bound)


def _name(number: int, variable: str) -> str:
    return f"{number}|{variable}"


def _alike(a: Candidate, of_a: str, b: Candidate, of_b: str) -> np.ndarray:
    """0 where an input lies alike in both functions, else `NEVER`."""
    ours, theirs = a.layouts(of_a), b.layouts(of_b)
    return np.array([[0.0 if x == y else NEVER for y in theirs] for x in ours])
