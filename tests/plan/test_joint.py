"""The choices of all axes together: what is shared, what memory costs, what a search that ends early says."""

import pytest
import torch

import tutti
import zoo
from searches import wide
from tutti.plan.layouts.price import Pricer
from tutti.plan.layouts.problem import problem_of
from tutti.plan.network.sharding_problem import ShardingProblem
from tutti.plan.planner import Planner
from tutti.plan.title import title
from tutti.sim.planning import Simulator


@pytest.fixture(scope="module")
def graph():
    model = zoo.llama(2)
    return tutti.capture(model, zoo.tokens(24, 32), torch.optim.AdamW(model.parameters()))


@pytest.fixture(scope="module")
def joint(graph):
    return ShardingProblem(problem_of(graph), Pricer(tutti.Cluster.parse("cpu:4"), {"dp": 2, "tp": 2}))


def held_bytes(joint, chosen) -> float:
    """Bytes of what stays in memory under these choices, of inputs."""
    total = 0.0
    for label, options in joint.options.items():
        if label in joint.memory.inputs:
            total += joint.memory.inputs[label][options.choices.index(chosen.choices[label])]
    return total


def test_a_price_on_memory_buys_less_memory_for_more_time(joint):
    free, dear = joint.choose(), joint.choose(memory_price=1e-9)
    assert held_bytes(joint, dear) < held_bytes(joint, free) and free.gap < 1e-9 and dear.gap < 1e-5


def test_the_modelled_cost_is_what_the_simulation_of_the_plan_says():
    """But for what lowering finds to share beyond the hubs, and for copies that only lowering knows of."""
    graph = wide()
    planner = Planner(graph, tutti.Cluster.parse("h100:8"))
    for mesh in ({"dp": 8}, {"dp": 4, "tp": 2}, {"dp": 2, "tp": 4}):
        candidate = planner.on(mesh)
        prediction = Simulator("O0")(graph, candidate.plan(), planner.cluster)
        assert candidate.chosen.cost == pytest.approx(prediction.step_seconds, rel=0.06), mesh


def test_what_runs_more_often_costs_more(graph):
    pricer = Pricer(tutti.Cluster.parse("cpu:2"), {"dp": 2})
    once = ShardingProblem(problem_of(graph), pricer).choose().cost
    often = ShardingProblem(problem_of(graph), pricer, {"forward": 3, "backward": 3}).choose().cost
    assert 2 * once < often < 3.01 * once


def test_titles_say_what_axes_do(graph):
    planner = Planner(graph, tutti.Cluster.parse("cpu:4"))
    for name, shown in (("dp", "dp4"), ("tp", "tp4"), ("zero1", "dp4xzero1"), ("zero3", "dp4xzero3"),
                        ("dp2xtp2", "dp2xtp2"), ("single", "idle4")):  # fmt: skip
        plan = planner.named(name) if name != "single" else planner.named("dp").replace(operators={}, inputs={})
        assert title(plan, planner.problem) == shown


def test_costs_of_labels_add_up_to_what_was_paid(graph):
    """Whoever pays for a move, all of it is paid once."""
    often = {"forward": 4, "backward": 4}
    joint = ShardingProblem(problem_of(graph), Pricer(tutti.Cluster.parse("cpu:4"), {"dp": 2, "tp": 2}), often)
    chosen = joint.choose()
    costs, operators = joint.costs(chosen), joint.problem.operators
    runs = {label: o.count * often.get(o.phase, 1) for label, o in operators.items()}
    assert sum(cost.seconds * runs[label] for label, cost in costs.items()) == pytest.approx(chosen.cost)
    inputs = sum(cost.stored * operators[label].count for label, cost in costs.items() if operators[label].is_input)
    activations = sum(cost.activations * operators[label].count for label, cost in costs.items())
    assert inputs < chosen.memory and 0 < activations < chosen.memory
