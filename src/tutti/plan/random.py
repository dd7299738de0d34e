"""Random legal plans, to test that numerical results do not depend on the plan."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from tutti.ir.step_graph import StepGraph
from tutti.plan.layouts.choice import Choice, Position, candidates, layouts, legal, nest
from tutti.plan.layouts.layout import Mesh
from tutti.plan.layouts.problem import Operator, problem_of
from tutti.plan.plan import Plan

if TYPE_CHECKING:
    from tutti.api.step import Step
    from tutti.hardware import Cluster


def random_plan(graph: StepGraph | Step, cluster: Cluster | int, seed: int) -> Plan:
    """A random legal plan: any mesh of the cluster's devices, any choice for any operator.

    graph: a StepGraph or a Step.
    cluster: a cluster or a number of devices.
    seed: seed of the random numbers. Equal seeds give equal plans.
    """
    rng = Random(seed)
    graph = graph if isinstance(graph, StepGraph) else graph.graph
    mesh = random_mesh(cluster if isinstance(cluster, int) else cluster.size, rng)
    problem = problem_of(graph)
    inputs, operators = {}, {}
    for label, o in problem.operators.items():
        choices = _draw(o, problem.cuts[label], mesh, rng)
        if not choices:
            continue
        if o.is_input:
            inputs[label] = layouts(o.rule, choices)[1][0]
        else:
            operators[label] = choices
    return Plan(mesh, inputs, operators, name=f"random {seed}", graph=graph.fingerprint)


def random_mesh(devices: int, rng: Random) -> Mesh:
    """A random ordered factorization of the number of devices."""
    sizes = []
    while devices > 1:
        divisors = [d for d in range(2, devices + 1) if devices % d == 0]
        sizes.append(rng.choice(divisors))
        devices //= sizes[-1]
    return {f"axis{i}": size for i, size in enumerate(sizes or [1])}


def _draw(o: Operator, cuts: dict[str, set[Position]], mesh: Mesh, rng: Random) -> dict[str, Choice]:
    choices: dict[str, Choice] = {}
    for axis in rng.sample(list(mesh), len(mesh)):
        options = [c for c in candidates(o.rule, cuts, mesh[axis]) if not (c.linear and o.is_input)]
        rng.shuffle(options)
        for option in options[: rng.randint(0, 3) and len(options)]:  # do not split a quarter of the operators
            nested = nest(option, choices, mesh)
            if legal(o.rule, {**choices, axis: nested}, mesh):
                choices[axis] = nested
                break
    return choices
