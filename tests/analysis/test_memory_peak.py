"""Peaks of tiny Programs, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import torch

import tutti
import zoo
from liveness import most_alive
from programs import program
from tutti.analysis.kernels import fuse
from tutti.analysis.memory import CPU, CUDA, course, memory, platform
from tutti.analysis.passes import improve
from tutti.analysis.replay import replay
from tutti.hardware import Cluster
from tutti.lower.collectives import all_gather, reduce_scatter
from tutti.lower.shard import shard
from tutti.plan.plan import Plan
from tutti.sim.dryrun import dry_run

aten = torch.ops.aten
WEIGHT, BATCH = 4 * 8 * 4, 8 * 4 * 4  # bytes


def two_layers(calls, w, x):
    a = calls(aten.mm.default, (w, x), (4, 4), label="product")
    b = calls(aten.relu.default, (a,), (4, 4), label="relu")
    flat = calls(aten.reshape.default, (b, [16]), (16,), label="flat")  # a view
    return (calls(aten.sum.default, (flat,), (), label="sum"),)


def test_values_count_from_their_call_to_their_last_use():
    usage = memory(replay(program(two_layers, {"param:w": (4, 8), "batch:x": (8, 4)}, {"dp": 1})))
    assert usage.peak == WEIGHT + BATCH + 64 + 64  # product and relu
    assert usage.at == "relu"
    assert usage.kinds == {"parameters": WEIGHT, "batch": BATCH, "temporaries": 128}
    assert [(a.label, a.bytes) for a in usage.alive if a.kind == "temporaries"] == [("product", 64), ("relu", 64)]


def test_a_view_keeps_what_it_looks_at_alive_and_a_copy_does_not():
    def viewed(calls, x):
        a = calls(aten.relu.default, (x,), (4, 4))
        corner = calls(aten.slice.Tensor, (a, 0, 0, 1), (1, 4))
        b = calls(aten.neg.default, (corner,), (1, 4))
        c = calls(aten.cat.default, ([b] * 8,), (8, 4), label="large")
        return (calls(aten.sum.default, (c,), ()), corner)

    def copied(calls, x):
        a = calls(aten.relu.default, (x,), (4, 4))
        corner = calls(aten.slice.Tensor, (a, 0, 0, 1), (1, 4))
        b = calls(aten.neg.default, (corner,), (1, 4))
        c = calls(aten.cat.default, ([b] * 8,), (8, 4), label="large")
        return (calls(aten.sum.default, (c,), ()),)

    inputs = {"batch:x": (4, 4)}
    assert memory(replay(program(viewed, inputs, {"dp": 1}))).peak == 64 + 64 + 16 + 128
    assert memory(replay(program(copied, inputs, {"dp": 1}))).peak == 64 + 16 + 128


def test_blocks_of_512_bytes_on_a_gpu():
    played = replay(program(two_layers, {"param:w": (4, 8), "batch:x": (8, 4)}, {"dp": 1}))
    assert memory(played, CUDA).peak == 4 * 512
    assert platform(Cluster.parse("h100:2").device) is CUDA


def gathered(calls, w):
    """(8,) on each of 4 ranks: gathered, summed; then something that needs as much again."""
    whole = calls(all_gather, (w, "dp", 4), (4, 8), label="gathered")
    total = calls(aten.sum.default, (whole,), (), label="sum")
    return (calls(aten.expand_copy.default, (total, [32]), (32,), label="later"),)


def test_the_last_answer_of_a_collective_is_held_until_the_next():
    usage = memory(replay(program(gathered, {"param:w": (8,)}, {"dp": 4})))
    assert usage.peak == 32 + 128 + 4 + 128 and usage.at == "later"
    assert usage.kinds["communication"] == 128


def test_gloo_copies_what_it_reduces_and_scatters():
    def scattered(calls, g):
        turned = calls(aten.permute.default, (g, [1, 0]), (4, 8))
        return (calls(reduce_scatter, (turned, "dp", "sum"), (8,), label="scattered"),)

    played = replay(program(scattered, {"grad:w": (8, 4)}, {"dp": 4}))
    whole, part = 8 * 4 * 4, 8 * 4
    assert memory(played).peak == whole + part + whole + whole  # in one piece, and Gloo's own
    assert memory(played, CUDA).kinds["workspace"] == 512
    assert memory(played).kinds["accumulated gradients"] == whole


def test_accumulated_gradients_are_in_the_peak_of_a_step():
    model, batch = zoo.llama(), zoo.tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = tutti.parallelize(model, optimizer, batch, cluster="cpu:1", plan="dp", level="O0", accumulate=2)
    step(batch)
    _, measured = most_alive(lambda state, data: step(data), step.store.parts, batch)
    prediction = dry_run(step.graph, step.plan, step.cluster)
    assert [part.runs for part in prediction.parts] == [2, 1]
    seen = max(memory(p.simulation.replays[0], replace(CPU, inside=False)).peak for p in prediction.parts)
    assert abs(seen / measured - 1) < 0.01  # memory inside of operators is not measured
    sums = sum(p.numel() * 4 for p in model.parameters())
    assert prediction.memory.kinds["accumulated gradients"] == sums


def test_a_result_that_overwrites_an_operand_counts_once():
    """At O2 kernels write over operands that die; no kind of memory is negative, and kinds add up to the peak."""
    model = zoo.llama(1)
    graph = tutti.capture(model, zoo.tokens(4), torch.optim.AdamW(model.parameters()))
    played = fuse(replay(improve(shard(graph, Plan({"dp": 1}), 0), "O2")), "O2")
    assert any(event.reuses for event in played.events)
    usage = memory(played, CUDA)
    assert all(n >= 0 for n in usage.kinds.values()) and all(a.bytes >= 0 for a in usage.alive)
    assert sum(usage.kinds.values()) == usage.peak == max(sum(kinds.values()) for _, kinds in course(played, CUDA))
    assert all(n >= 0 for _, kinds in course(played, CUDA) for n in kinds.values())
