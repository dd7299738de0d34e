"""Plans functions that share stored tensors together: the shared layouts minimize the weighted sum of their costs.

Each function is a cost network (`plan.network.sharding_problem`). They are combined into one network with weighted
costs. A pair connects the variables of a shared input and makes different layouts impossible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tutti.plan.layouts.layout import Layout
from tutti.plan.network.minimize import minimize
from tutti.plan.network.network import NEVER, Network
from tutti.plan.plan import Plan
from tutti.plan.planner import Candidate


@dataclass(frozen=True)
class Together:
    """plans: one per function. cost: weighted sum of their modelled seconds. bound: lower bound of the cost."""

    plans: list[Plan]
    cost: float
    bound: float


def plan_together(
    candidates: Sequence[Candidate],
    weights: Sequence[float],
    stored: Sequence[Mapping[str, str]],
    seconds: float = 60.0,
    fixed: Mapping[str, Layout] | None = None,
) -> Together:
    """The cheapest plans on one mesh in which shared inputs have the same layouts.

    candidates: one per function, all on one mesh.
    weights: number of runs of each function.
    stored: for each function, name of a stored input -> its label in the function's graph.
    seconds: budget of nominal seconds of work.
    fixed: fixed layouts, by name.

    Raises ValueError if no layout is possible for all functions.
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
            if name in (fixed or {}):
                lies = [layout == (fixed or {})[name] for layout in candidates[j].layouts(label)]
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
    """0 for equal layouts of an input in both functions, `NEVER` for others."""
    ours, theirs = a.layouts(of_a), b.layouts(of_b)
    return np.array([[0.0 if x == y else NEVER for y in theirs] for x in ours])
