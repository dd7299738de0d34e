"""What a restart reads, as predicted, is what is read. By processes: tests/checkpoint/test_peers.py."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch

import tutti
import zoo
from cases import slow
from tutti.ir.kind import CALL_INPUTS, kind_of
from tutti.plan.layouts.boxes import boxes, is_owner, overlap
from tutti.sim.restart import Restart, Storage, restart


@cache
def step(plan: str, devices: int) -> tutti.Step:
    model = zoo.llama(4)
    return tutti.parallelize(
        model, torch.optim.AdamW(model.parameters()), zoo.tokens(120), cluster=f"cpu:{devices}", plan=plan, level="O0",
        accumulate=4 if "pp" in plan else 1,
    )  # fmt: skip


def block_by_block(then: tutti.Step, now: tutti.Step, width: int, lost: int) -> tuple[list, list, list]:
    """The same, each rank, block and file by itself: bytes of devices and of machines, and bytes sent to machines."""
    graph, had = now.graph, -(-then.world_size // width)
    machines = -(-now.world_size // width)
    left = [i for i in range(had) if i != lost] if machines != had else list(range(had))
    read, sent, once = Counter(), Counter(), Counter()
    for number, name in enumerate(name for name in graph.inputs if kind_of(name) not in CALL_INPUTS):
        spec, label = graph.spec(name), graph.inputs[name].meta["label"]
        before, after = then.plan.input_layout(label), now.plan.input_layout(label)
        written = [(block, rank) for rank in range(then.world_size) if is_owner(before, then.plan.mesh, rank, number)
                   for block in boxes(before, spec.shape, then.plan.mesh, rank)]  # fmt: skip
        seen = set()
        for rank in range(now.world_size):
            machine = rank // width
            place = left[machine] if machine < len(left) and left[machine] != lost else None
            for box in boxes(after, spec.shape, now.plan.mesh, rank):
                for block, owner in written:
                    if shared := overlap(box.whole, box.sizes, block.whole, block.sizes):
                        numbers = torch.Size([b - a for a, b in zip(*shared, strict=True)]).numel()
                        count = numbers * spec.dtype.itemsize
                        read[rank] += count
                        if (machine, shared) not in seen:
                            once[machine] += count
                            seen.add((machine, shared))
                        if place not in (owner // width, (owner // width + 1) % had):
                            sent[machine] += count
    return (
        [read[i] for i in range(now.world_size)],
        [once[i] for i in range(machines)],
        [sent[i] for i in range(machines)],
    )


@pytest.mark.parametrize(("before", "m", "after", "n", "width", "lost"), [
    ("dp2xtp2", 4, "dp2xtp2", 4, 2, 1), ("dp2xtp2", 4, "zero3", 3, 1, 0), slow("zero3", 6, "tp2xzero3", 6, 2, 1),
    ("tp2xzero3", 6, "tp4", 4, 2, 2), slow("zero1", 4, "dp4xtp2", 8, 2, 0),
])  # fmt: skip
def test_it_is_what_counting_every_block_gives(before, m, after, n, width, lost):
    then, now = step(before, m), step(after, n)
    prediction = restart(now.graph, now.plan, width, then.plan, lost=lost)
    assert (prediction.devices, prediction.machines, prediction.sent) == block_by_block(then, now, width, lost)
    assert sum(prediction.sent) > 0


@pytest.mark.parametrize(("before", "m", "after", "n"), [
    slow("zero3", 3, "dp2xtp2", 4), ("dp2xtp2", 4, "pp2xtp2", 4), slow("pp4", 4, "pp2-interleaved2", 2),
])  # fmt: skip
def test_a_process_of_all_ranks_reads_as_much(before, m, after, n, tmp_path):
    then, now, checkpoints = step(before, m), step(after, n), tutti.Checkpoints(tmp_path)
    then.save(checkpoints)
    read = now.load(checkpoints.wait())
    assert restart(now.graph, now.plan, n, then.plan).machines == [read]


def test_seconds_are_those_of_the_narrowest(tmp_path):
    prediction = Restart(
        100, [30, 20], [40, 20], [10, 0], Storage(process=1, machine=8, files=10, network=4, checksum=50)
    )
    assert (prediction.times, prediction.reading, prediction.receiving) == (0.6, 30, 30)
    assert prediction.checking == 100 / 2 / 8 and prediction.checking_memory == 2 * 100 / 2 / 50
    slow = Restart(100, [30, 20], [40, 20], [80, 0], Storage(process=9, machine=8, files=2, network=4, checksum=50))
    assert (slow.reading, slow.receiving) == (60 / 4, 20)
