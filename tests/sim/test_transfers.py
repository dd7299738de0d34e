"""Transfers and the host on the clock: links of their own, beside what the device computes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

import tutti
import zoo
from tutti.hardware.device import Outer
from tutti.plan.planner import Planner
from tutti.sim.dryrun import dry_run
from tutti.sim.tasks import HOST_COMPUTES, IN, OUT

V100 = tutti.Cluster.parse("v100-32:1")


@cache
def graph():
    model = zoo.llama(3).to(torch.bfloat16)
    return tutti.capture(model, zoo.tokens(4), torch.optim.AdamW(model.parameters()), fp32_master_weights=True)


def ran(name, cluster=V100, level="O0"):
    return dry_run(graph(), Planner(graph(), cluster).named(name), cluster, level)


def beside(outer: Outer) -> tutti.Cluster:
    return tutti.Cluster(replace(V100.device, beside=outer), V100.levels)


def sizes(*kinds):
    return sum(graph().spec(n).bytes for n in graph().inputs if n.partition(":")[0] in kinds)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_bytes_by_tier_and_over_links(level):
    run = ran("offload2", level=level)
    state, own = sizes("master", "exp_avg", "exp_avg_sq"), sizes("param")
    assert state + own <= run.memory.tiers["host"] < 1.5 * (state + own)
    traffic = run.communication()
    assert traffic["lend", OUT][1] == own, "a gradient goes out for each parameter"
    assert own < traffic["fetch", IN][1] <= 2 * own, (
        "parameters come twice, but for those that are wanted again at once"
    )
    (simulation,) = [part.simulation for part in run.parts]
    assert set(simulation.busy(0)) == {"compute", IN, OUT, HOST_COMPUTES}


def test_a_fast_link_is_hidden_and_a_slow_one_is_waited_for():
    fast, slow = (ran("offload2", beside(Outer(2**40, link, 1e15))).prediction() for link in (1e15, 1e6))
    without = ran("single").prediction()
    assert fast.step_seconds <= without.step_seconds and fast.transfer_seconds < 1e-3 * fast.step_seconds
    assert slow.transfer_seconds > 0.9 * slow.step_seconds
    assert slow.step_seconds >= max(2 * sizes("param") * 0.5, sizes("param")) / 1e6


def test_the_host_takes_as_long_as_its_memory():
    host = Outer(2**40, 1e15, 1e6)
    prediction = ran("offload", beside(host)).prediction()
    read_and_written = 2 * sizes("master", "exp_avg", "exp_avg_sq") + sizes("param")  # and the gradient
    assert prediction.step_seconds == pytest.approx(read_and_written / 1e6, rel=0.35)
    assert prediction.communication_seconds == 0 < prediction.transfer_seconds


def test_what_is_kept_outside_is_not_on_the_device():
    peaks = [ran(name).memory.peak for name in ("single", "offload", "offload2")]
    assert peaks[0] - peaks[1] > 0.9 * sizes("exp_avg", "exp_avg_sq", "master") and peaks[2] < peaks[1]


def test_a_cluster_says_what_is_beside_its_devices():
    mine = beside(Outer(1e12, 2e10, 3e10, "mine"))
    assert tutti.Cluster.from_json(mine.to_json()) == mine and mine.device.outside.link == 2e10
    assert V100.device.outer == "host" and tutti.Cluster.parse("cpu:2").device.outer == "disk"
