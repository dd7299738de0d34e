"""ZeRO over a part of data parallelism: the numbers of one device, and what is communicated."""

from collections import Counter

import pytest
import torch

import tutti
import zoo
from cases import slow
from tutti.plan.textbook import parse_name


def trained(plan: str, devices: int):
    torch.manual_seed(0)
    model, data = zoo.llama(2), zoo.tokens(8, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = tutti.parallelize(model, optimizer, data, cluster=f"cpu:{devices}", plan=plan, level="O0")
    return step, [step(data).item() for _ in range(2)]


@pytest.mark.parametrize("plan, devices", [("dp4xzero3xshard2", 4), slow("dp4xtp2xzero1xshard2", 8)])
def test_the_numbers_of_one_device(plan, devices):
    step, losses = trained(plan, devices)
    assert losses == pytest.approx(trained("single", 1)[1], rel=1e-5)
    assert {"dp": 2, "fsdp": 2}.items() <= dict(step.plan.mesh).items() and step.plan.name == plan
    kinds = Counter((c.kind, c.axis) for c in step.collectives())
    assert kinds["all_gather", "fsdp"] and not kinds["all_gather", "dp"], "parameters are gathered in a group"
    assert kinds["all_reduce", "dp"], "gradients are added over the groups"


@pytest.mark.parametrize("name, message", [
    ("dp8xzero3xshard3", "shard3 of 8 data-parallel devices; possible are shard2, shard4"),
    ("dp8xshard4", "it goes with zero1, zero2 or zero3"),
    ("dp8xzero3xshard8", "possible are shard2, shard4"),
])  # fmt: skip
def test_what_cannot_be(name, message):
    with pytest.raises(ValueError, match=message):
        parse_name(name, 8)
