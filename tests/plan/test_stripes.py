"""Context parallelism splits the sequences of causal attention into stripes, so that all ranks work alike."""

import pytest
import torch

import tutti
import zoo
from cases import slow
from tutti.hardware import Cluster
from tutti.plan.layouts.layout import Split
from tutti.plan.planner import Planner
from tutti.plan.textbook import parse_name
from tutti.sim.dryrun import dry_run


def trained(plan: str, devices: int, length: int = 16):
    torch.manual_seed(0)
    model, data = zoo.llama(2), zoo.tokens(8, length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = tutti.parallelize(model, optimizer, data, cluster=f"cpu:{devices}", plan=plan, level="O0")
    return step, [step(data).item() for _ in range(2)]


@pytest.mark.parametrize("plan, devices", [("cp2", 2), slow("cp4", 4), ("dp2xcp2xzero3", 4), slow("cp2xtp2", 4)])
def test_the_numbers_of_one_device(plan, devices):
    step, losses = trained(plan, devices)
    assert losses == pytest.approx(trained("single", 1)[1], rel=1e-5)
    parts = step.plan.mesh["cp"]
    assert step.plan.inputs["batch:input_ids"]["cp"] == Split(1, 16 // parts)
    assert not [c for c in step.collectives() if c.axis == "cp" and c.kind == "all_to_all"], "nothing is moved"


def test_a_sequence_that_does_not_divide_has_contiguous_parts():
    step, losses = trained("cp2", 2, length=15)
    assert losses == pytest.approx(trained("single", 1, length=15)[1], rel=1e-5)
    assert step.plan.inputs["batch:input_ids"]["cp"] == Split(1, unit=1)


def test_contiguous_parts_take_longer():
    """The last rank attends to all keys, twice as many as on average."""
    torch.manual_seed(0)
    model, data = zoo.llama(2), zoo.tokens(2, 64)
    graph = tutti.capture(model, data, torch.optim.AdamW(model.parameters()))
    cluster, book = Cluster.parse("h100:4"), parse_name("cp4", 4)
    work = {}
    for stripes in (True, False):
        run = dry_run(graph, Planner(graph, cluster).textbook(book, stripes=stripes).plan(), cluster, overlaps=False)
        tasks = run.parts[0].simulation.tasks[0]
        work[stripes] = sum(task.flops for task in tasks if "attention" in task.name)
    assert work[False] > 1.5 * work[True]
