"""What is said if no plan fits: a cluster on which one does, and state outside of the devices."""

from dataclasses import replace

import pytest

import tutti
from searches import alone, predicted, search, wide
from tutti.hardware.device import Outer
from tutti.plan.plan import Plan, Prediction
from tutti.plan.planner import Planner
from tutti.plan.search.leading import Leading
from tutti.plan.search.reasons import enough, outside, too_large
from tutti.plan.textbook import parse_name
from tutti.sim.planning import Simulator

CLUSTER = alone("h100:2")


@pytest.fixture(scope="module")
def graph():
    return wide()


def small(graph, share: float):
    """A search on devices with this share of the memory that the smallest of two plans needs, and that plan."""
    plans = [predicted(graph, CLUSTER, name) for name in ("tp2", "zero3")]
    smallest = min(plans, key=lambda plan: plan.predicted.peak_bytes)
    device = replace(CLUSTER.device, memory=share * smallest.predicted.peak_bytes)
    return search(graph, tutti.Cluster(device, CLUSTER.levels)), smallest


def test_more_devices_are_named_even_after_the_time_is_over(graph):
    search, _ = small(graph, 0.4)
    search.stop = lambda: True
    search.planner(1)
    larger = enough(search)
    assert larger and larger.bytes <= search.memory and larger.simulated
    state = sum(node.meta["val"].bytes for node in graph.inputs.values())
    assert larger.cluster.size > 2 and state / larger.cluster.size <= search.memory, "fewer could not hold the state"


@pytest.mark.parametrize("late", [False, True])
def test_a_named_plan_on_more_devices_has_tp_inside_a_node(graph, late):
    search, _ = small(graph, 0.1)
    search.leading = Leading(search)
    search.stop = lambda: late
    larger = enough(search)
    assert larger and larger.bytes <= search.memory and larger.simulated != late
    name, _, count = larger.plan.partition(" --accumulate ")
    book = parse_name(name, larger.cluster.size)
    assert larger.cluster.levels[0][0] % book.tp == 0 and str(larger).startswith(f"{larger.cluster}: there {name}")
    if late:  # an estimate is what there is time for
        assert larger.bytes <= 0.7 * search.memory
        return
    microbatches = int(count or 1)
    step = search.planner(microbatches, book.variant).step
    plan = Planner(step, larger.cluster, (), microbatches, book.variant).named(name)
    assert Simulator("O0")(step, plan, larger.cluster).peak_bytes <= search.memory


def test_what_lacks_outside_of_the_devices_is_told():
    gib = 2**30
    device = replace(CLUSTER.device, memory=80 * gib, beside=Outer(256 * gib, 1e10, 1e10))
    state = search(wide(), tutti.Cluster(device, CLUSTER.levels))
    whole = Plan({"tp": 2}, name="tp2", prediction=Prediction(1, 1, 0, 0, 0, 700 * gib))
    away = whole.replace(name="tp2xoffload", tiers={"x": "host"},
                         prediction=Prediction(2, 1, 0, 0, 0, 67 * gib, bytes_by_tier={"host": 560 * gib}))  # fmt: skip
    state.plans, state.planners = [whole, away], {}
    state.planner(1)
    assert state.in_order()[0] is away, "it lacks 304 GiB, the other 620 GiB"
    said = str(too_large(state, away))
    assert "no plan fits into 80 GiB per device and 256 GiB of the host for each on" in said
    assert "needs 67 GiB () and 560 GiB of the host" in said and "or 560 GiB of the host for each device" in said
    assert "or devices with 700 GiB of memory" in said and "devices with 67 GiB" not in said


def test_a_search_without_hope_ends_with_its_budget(graph):
    search, _ = small(graph, 0.05)
    search.stop = lambda: True
    with pytest.raises(ValueError, match="is estimated to need"):
        search.best()
    assert search.hopeless and len(search.plans) == 1, "the smallest named plan alone is simulated"


def test_state_outside_of_the_devices_is_named_if_it_helps(graph):
    search, smallest = small(graph, 0.9)
    assert outside(search, smallest) is None, "there is no room outside"
    device = replace(search.cluster.device, beside=Outer(1e12, 1e10, 1e10))
    search.cluster = tutti.Cluster(device, CLUSTER.levels)
    plan = outside(search, smallest)
    assert plan and plan.name in (f"{smallest.name}xoffload", f"{smallest.name}xoffload2") and search.fits(plan)
    error = too_large(search, smallest)
    assert f"or state outside of the devices: --plan {plan.name} --accumulate 1 takes " in str(error)
    assert error.enough.startswith("h100:") and f"it needs about {error.enough}: there " in str(error)
