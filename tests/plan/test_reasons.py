"""What is said if no plan fits: a cluster on which one does, and state outside of the devices."""

from dataclasses import replace

import pytest

import tutti
from searches import alone, predicted, search, wide
from tutti.hardware.device import Outer
from tutti.plan.reasons import enough, outside, too_large

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
    plan = enough(search)
    assert plan and plan.predicted.peak_bytes <= search.memory
    count = tutti.Cluster.parse(plan.cluster).size
    state = sum(node.meta["val"].bytes for node in graph.inputs.values())
    assert count > 2 and state / count <= search.memory, "fewer could not hold the state"


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
