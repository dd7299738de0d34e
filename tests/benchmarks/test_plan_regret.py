"""The plans that the benchmark of regret compares: legal, all different, whatever their axes are called."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import tutti

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import plan_regret
import plan_regret_cases as cases
import zoo
from tutti.hardware import Cluster
from tutti.hardware.curve import Curve
from tutti.hardware.device import Link
from tutti.lower.variants.vary import vary
from tutti.plan.plan import renamed
from tutti.plan.planner import Planner


@pytest.fixture(scope="module")
def graph():
    model = zoo.llama(1)
    return tutti.capture(model, zoo.tokens(12), torch.optim.AdamW(model.parameters()))


@pytest.mark.slow
def test_plans_are_legal_and_all_different(graph):
    cluster = Cluster.parse("cpu:2")
    plans = cases.plans_of(graph, cluster)
    assert len(plans) >= 8
    assert len({cases.content(plan) for plan in plans.values()}) == len(plans)
    for plan in plans.values():
        plan.check(vary(graph, plan.variant))
    names = [name for line in plans for name in line.split(" = ")]
    assert names[0] == "auto" and {"dp", "tp", "zero1", "zero3", "auto for slow links", "random 0"} <= set(names)
    assert sum(name.startswith("auto with") for name in names) == cases.CHANGED
    assert [plan_regret.chosen({"plan": name}) for name in plans] == [True] + [False] * (len(plans) - 1)


def test_plans_say_the_same_by_any_names_of_their_axes(graph):
    plan = Planner(graph, Cluster.parse("cpu:2")).named("dp")
    assert cases.content(plan) == cases.content(renamed(plan, {"dp": "rows"}).replace(name="another"))
    assert cases.content(plan) != cases.content(Planner(graph, Cluster.parse("cpu:2")).named("zero1"))


def test_links_that_are_faster_in_all():
    curve = Curve(((0.0, 1.0), (10.0, 3.0)))
    link = Link(100.0, 2.0, measured=(("all_reduce", 2, curve),))
    cluster = Cluster(Cluster.parse("cpu").device, ((2, link),))
    faster = cases._with_links(cluster, 10.0)
    assert faster.time("all_reduce", 10.0, 1, 2) == pytest.approx(0.3)
    assert faster.time("all_to_all", 1000.0, 1, 2) == pytest.approx(cluster.time("all_to_all", 1000.0, 1, 2) / 10)


def test_the_lower_quartile():
    assert plan_regret.lower_quartile([5.0, 1.0, 4.0, 2.0, 3.0]) == 2.0
    assert plan_regret.lower_quartile([7.0]) == 7.0
