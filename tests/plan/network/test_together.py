"""Layouts that several functions share: the cheapest for the weighted sum, as brute force finds it."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from tutti.hardware import Cluster
from tutti.plan.network.together import plan_together
from tutti.plan.planner import Candidate, Planner
from tutti.tracing.function import capture_function
from tutti.tracing.holdings import Holdings

CLUSTER = Cluster.parse("h100:4")
MESHES = {"dp": 4}, {"dp": 2, "tp": 2}


def functions(width: int = 64, training: int = 512, decoding: int = 4):
    """A training step and a forward pass of so many rows over the same two matrices."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 4 * width, bias=False), nn.ReLU(), nn.Linear(4 * width, width, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def decode(x):
        with torch.no_grad():
            return model(x).argmax(-1)

    holdings = Holdings({"model": model, "optimizer": optimizer})
    sizes = (train, training), (decode, decoding)
    return [capture_function(f, (torch.zeros(n, width),), {}, holdings).graph for f, n in sizes]


def candidates(mesh, **sizes) -> tuple[list[Candidate], list[dict[str, str]]]:
    graphs = functions(**sizes)
    stored = [{name: x.meta["label"] for name, x in g.inputs.items() if name.startswith("param:")} for g in graphs]
    return [Planner(graph, CLUSTER).on(mesh) for graph in graphs], stored


CASES = [
    pytest.param(MESHES[0], (1.0, 1.0)),
    pytest.param(MESHES[0], (1.0, 50.0)),
    pytest.param(MESHES[1], (1.0, 50.0), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("mesh", "weights"), CASES, ids=str)
def test_the_cheapest_layouts_are_those_of_brute_force(mesh, weights):
    pair, stored = candidates(mesh)
    together = plan_together(pair, weights, stored)
    names = list(stored[0])
    shared = [[x for x in pair[0].layouts(stored[0][n]) if x in pair[1].layouts(stored[1][n])] for n in names]
    costs = []
    for layouts in product(*shared):
        assignment = dict(zip(names, layouts, strict=True))
        each = []
        for candidate, labels in zip(pair, stored, strict=True):
            only = {labels[n]: candidate.layouts(labels[n]).index(at) for n, at in assignment.items()}
            each.append(candidate.joint.choose(0.0, 60.0, only).cost)
        costs.append(sum(w * c for w, c in zip(weights, each, strict=True)))
    assert together.cost == pytest.approx(min(costs), rel=1e-6)
    assert together.bound <= together.cost * (1 + 1e-9)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_together_costs_less_than_with_the_layouts_of_either_alone(mesh):
    pair, stored = candidates(mesh, width=1024, training=2048, decoding=8)
    weights = 1.0, 20.0
    together = plan_together(pair, weights, stored)
    alone = []
    for i, candidate in enumerate(pair):
        chosen = candidate.plan()
        fixed = {name: chosen.input_layout(label) for name, label in stored[i].items()}
        try:
            alone.append(plan_together(pair, weights, stored, fixed=fixed).cost)
        except ValueError:  # layouts that the other function cannot have
            continue
    assert alone and together.cost < 0.99 * min(alone)
    for name in stored[0]:
        first, second = (plan.input_layout(labels[name]) for plan, labels in zip(together.plans, stored, strict=True))
        assert first == second
