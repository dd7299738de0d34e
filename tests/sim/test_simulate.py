"""Simulated Programs against the prices of what they are made of, and symmetry between ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tutti
import zoo
from programs import program
from tutti.analysis.passes import improve
from tutti.hardware import Cluster
from tutti.lower.collectives import all_gather, all_reduce
from tutti.lower.overlap.waits import insert_waits
from tutti.lower.shard import shard
from tutti.plan.planner import Planner
from tutti.sim.dryrun import dry_run
from tutti.sim.simulate import dtype_of, simulate

aten = torch.ops.aten
H100 = Cluster.parse("h100:8")
# equal devices, which compute at full speed beside collectives
STEADY = replace(H100, device=replace(H100.device, yields=0.0, varies=0.0))
ONE = Cluster.parse("h100:1")
BF16 = torch.bfloat16


def captured(batch: int = 8):
    model, data = zoo.llama(), zoo.tokens(batch=batch)
    return tutti.capture(model, data, torch.optim.AdamW(model.parameters(), lr=1e-3))


def chain(calls, x, *weights):
    for i, w in enumerate(weights):
        x = calls(aten.mm.default, (x, w), (512, w.meta["val"].shape[1]), BF16, f"layer {i}")
    return (x,)


CHAIN = {"batch:x": (512, 256), "param:a": (256, 1024), "param:b": (1024, 64), "param:c": (64, 64)}
PRODUCTS = [(512, 256, 1024), (512, 1024, 64), (512, 64, 64)]


def test_a_chain_of_products_on_one_device_takes_the_sum_of_their_prices():
    simulation = simulate([program(chain, CHAIN, {"dp": 1}, dtype=BF16)], ONE)
    device = ONE.device
    assert simulation.seconds == pytest.approx(
        sum(device.matmul_seconds(1, *s, BF16) + device.overhead for s in PRODUCTS)
    )
    assert simulation.flops == sum(2 * m * k * n for m, k, n in PRODUCTS)
    assert simulation.busy(0) == {"compute": pytest.approx(simulation.seconds)} and not simulation.exposed(0)
    assert simulation.slowest(0)[0][0] == "layer 0"
    assert dtype_of([program(chain, CHAIN, {"dp": 1}, dtype=BF16)]) == BF16


def reduced(calls, g):
    """A gradient is reduced over dp; something else that does not wait for it follows."""
    total = calls(all_reduce, (g, "dp", "sum"), (1 << 22,), label="gradient")
    other = calls(aten.neg.default, (g,), (1 << 22,), label="other")
    return (calls(aten.add.Tensor, (total, other), (1 << 22,), label="both"),)


def test_an_all_reduce_takes_what_the_cluster_says_and_a_copy_into_its_result():
    count = 4 << 22
    for overlaps in (False, True):
        one = program(reduced, {"grad:w": (1 << 22,)}, {"dp": 8})
        if overlaps:
            insert_waits(one.graph, [])
        simulation = simulate([one], STEADY)
        sent = 2 * 7 * count // 8
        wire = H100.time("all_reduce", sent, 1, 8)
        device = H100.device
        copy, neg, add = (n * count / device.reached + device.overhead for n in (2, 2, 3))
        hidden = min(wire, neg) if overlaps else 0.0
        assert simulation.seconds == pytest.approx(copy + wire + neg + add - hidden)
        assert simulation.communication(0) == {("all_reduce", "dp"): (1, sent, pytest.approx(wire))}
        assert simulation.exposed(0) == {("all_reduce", "dp"): pytest.approx(wire - hidden)}
        assert simulation.flops == 0
        assert simulation.busy(0)["dp"] + simulation.idle(0)["dp"] == pytest.approx(simulation.seconds)


def test_the_axis_says_which_links_are_used():
    cluster = Cluster.parse("h100:2x8")

    def build(axis, k):
        def gather(calls, w):
            return (calls(all_gather, (w, axis, k), (k, 1 << 20), label="w"),)

        return program(gather, {"param:w": (1 << 20,)}, {"dp": 2, "tp": 8})

    inside, between = (simulate([build(*axis)], cluster).seconds for axis in (("tp", 8), ("dp", 2)))
    assert inside == pytest.approx(cluster.time("all_gather", 7 << 22, 1, 8))
    assert between == pytest.approx(cluster.time("all_gather", 1 << 22, 8, 2))


def test_all_ranks_of_a_data_parallel_plan_end_at_the_same_time():
    graph, cluster = captured(), Cluster.parse("cpu:4")
    plan = Planner(graph, cluster).named("dp")
    step = graph.keep([n for n in graph.outputs if n not in graph.gradient_names])
    programs = [improve(shard(step, plan, rank), "O0") for rank in range(4)]
    simulation = simulate(programs, cluster)
    ends = {rank: max(s.end for s in simulation.spans if s.rank == rank) for rank in simulation.ranks}
    assert len(set(ends.values())) == 1 and ends[0] == simulation.seconds
    assert len({m.peak for m in simulation.memory.values()}) == 1
    alone = simulate(programs[:1], cluster)
    assert alone.seconds == pytest.approx(simulation.seconds) and alone.flops == simulation.flops
    slow = simulate(programs, cluster, slower={2: 2.0})
    assert slow.seconds > simulation.seconds + 0.9 * simulation.busy(2)["compute"]
    assert sum(slow.exposed(0).values()) > sum(slow.exposed(2).values())


def test_a_dry_run_of_microbatches_is_its_parts():
    graph, cluster = captured(), Cluster.parse("cpu:4")
    plan = Planner(graph, cluster, accumulate=3).named("dp2xtp2")
    run = dry_run(graph, plan, cluster)
    micro, update = run.parts
    assert (micro.runs, update.runs) == (3, 1)
    assert run.seconds == pytest.approx(3 * micro.simulation.seconds + update.simulation.seconds)
    exposed = sum(row[3] for row in run.communication().values())
    assert run.compute + exposed == pytest.approx(run.seconds)
    assert run.flops == 3 * graph.flops
    assert run.fraction_of_peak == pytest.approx(run.flops / (cluster.peak("float32") * run.seconds))


def test_fusing_only_saves():
    graph, cluster = captured(), Cluster.parse("h100:4")
    plan = Planner(graph, cluster).named("dp2xtp2")
    plain, fused = (dry_run(graph, plan, cluster, level) for level in ("O0", "O2"))
    assert fused.seconds < plain.seconds
    assert fused.flops == plain.flops
    assert {k: v[:2] for k, v in fused.communication().items()} == {k: v[:2] for k, v in plain.communication().items()}
    assert fused.parts[0].simulation.flops == plain.parts[0].simulation.flops


def test_another_number_of_devices():
    with pytest.raises(ValueError, match="the plan is for 8 devices, h100:1 has 1"):
        simulate([program(reduced, {"grad:w": (1 << 22,)}, {"dp": 8})], ONE)


def test_the_dtype_of_work_whose_first_result_is_not_made():
    """As of a convolution's gradient where the image needs none."""
    layer = torch.nn.Conv2d(3, 4, 3)
    batch = {"input": torch.zeros(2, 3, 8, 8)}
    step = tutti.capture(layer, batch, torch.optim.SGD(layer.parameters()), lambda model, b: model(**b).sum())
    run = dry_run(step, Planner(step, ONE).named("single"), ONE)
    assert dtype_of([run.parts[0].program]) == torch.float32
