"""Levels: a value of another stage comes from a lower level, and stored tensors are read as late as possible."""

import torch
from torch import nn

from pipelines import function_graph
from tutti.ir.step_graph import UPDATE
from tutti.lower.parts.crossings import levels
from tutti.plan.pipeline.function_stages import function_stages
from tutti.plan.pipeline.reads import Reads


def test_levels_count_how_often_values_have_crossed_stages():
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1, momentum=0.9)

    def update(x):
        optimizer.zero_grad()
        loss = second(first(x)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    graph = function_graph(update, torch.zeros(4, 8), first=first, second=second, optimizer=optimizer)
    reads = Reads(graph)
    stages = function_stages(reads, {"first": 0, "second": 1}, {})
    crossings = levels(reads, stages)
    for node in reads.calls:
        for x in reads.of(node):
            assert x not in crossings or crossings[x] + (stages[x] != stages[node]) <= crossings[node]
    assert {(stages[n], crossings[n]) for n in reads.calls} == {(0, 0), (1, 1), (0, 2)}
    updates = [n for n in reads.calls if n.meta["phase"] == UPDATE and stages[n] == 0]
    decayed = [n for n in updates if all(x.op == "placeholder" for x in reads.of(n))]
    assert decayed and {crossings[n] for n in updates} == {2}, "not kept from the beginning"
