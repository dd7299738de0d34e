"""Steps that run while they are recorded, on one device and on processes."""

import itertools
import json
from dataclasses import replace

import pytest
import torch

import tutti
from cases import slow
from tutti.ir.op_info import FLOPS
from tutti.observe.calls import MATMULS, WAIT, calls_of, count
from tutti.observe.diagnosis import diagnose
from tutti.observe.recorder import STEPS
from tutti.observe.recording import read
from zoo import llama, tokens


def step_and_batch(**more):
    model, batch = llama(), tokens()
    return tutti.parallelize(model, torch.optim.AdamW(model.parameters()), batch, **more), batch


@pytest.mark.parametrize(("level", "accumulate"), [("O0", 1), ("O0", 2), slow("O2", 1)])
def test_recording_changes_no_loss_and_knows_every_call(tmp_path, level, accumulate):
    (plain, batch), (step, _) = (step_and_batch(level=level, accumulate=accumulate) for _ in "ab")
    step.record(tmp_path)
    assert [plain(batch).item() for _ in range(3)] == [step(batch).item() for _ in range(3)]
    recording = read(tmp_path)
    (rank,) = recording.ranks
    programs = {name: len(seconds) for name, seconds in recording.predicted["programs"].items()}
    assert programs == rank.nodes  # the simulated Programs are those that ran
    for taken in rank.steps.values():
        times = [t for block in taken.blocks for t in (block.begin, block.end)]
        assert times == sorted(times) and taken.begin <= times[0] and times[-1] <= taken.end
        runs = [block.program for block in taken.blocks if block.number == 0]
        assert runs == (["a step"] if accumulate == 1 else ["a microbatch"] * 2 + ["the update"])


@pytest.mark.starts
def test_a_compiled_function_counts_as_what_it_was_made_of():
    totals = []
    for level in ("O0", "O2"):
        step, batch = step_and_batch(level=level)
        if level == "O0":
            flops = sum(FLOPS[n.target](n) for n in step.program.graph.nodes if n.target in FLOPS)
        step(batch)
        calls = calls_of(step.program).values()
        totals.append(sum(call.flops for call in calls))
        assert sum(call.nodes for call in calls) <= count(step.program)
        assert {call.kind for call in calls if call.flops} == {MATMULS}
    assert totals == [flops, flops]


def test_every_third_step_and_no_more_than_are_kept(tmp_path):
    step, batch = step_and_batch(level="O0")
    step.record(tmp_path, every=3)
    for _ in range(7):
        step(batch)
    step.evaluate(batch)
    assert list(read(tmp_path).ranks[0].steps) == [3, 6]
    step.record(tmp_path)
    for _ in range(2 * STEPS + 2):
        step(batch)
    steps = list(read(tmp_path).ranks[0].steps)
    assert steps == list(range(8 + STEPS, 8 + 2 * STEPS + 2))


def test_another_shape_of_batch_is_another_program(tmp_path):
    step, batch = step_and_batch(level="O0")
    step.record(tmp_path)
    for own in (batch, tokens(4), batch, tokens(8)):
        step(own)
    rank = read(tmp_path).ranks[0]
    assert list(rank.programs) == ["a step", "a step 2", "a step 3"]
    assert diagnose(tmp_path).seconds > 0


def test_virtual_devices_are_not_recorded(tmp_path):
    step, _ = step_and_batch(level="O0", cluster="cpu:2", plan="dp")
    with pytest.raises(ValueError, match="2 virtual devices take turns"):
        step.record(tmp_path)


def job(folder, plan, accumulate, hidden):
    cluster = tutti.Cluster.parse("cpu:4")
    cluster = replace(cluster, device=replace(cluster.device, overlaps=hidden))
    step, batch = step_and_batch(level="O0", plan=plan, accumulate=accumulate, cluster=cluster)
    step.record(folder)
    return [step(batch).item() for _ in range(3)]


@pytest.mark.parametrize(
    ("plan", "accumulate", "hidden"), [slow("dp2xtp2", 1, False), slow("dp", 1, True), ("pp2xdp2", 2, False)]
)
def test_all_ranks_of_a_job_on_one_clock(pool, tmp_path, plan, accumulate, hidden):
    pool.run(job, tmp_path, plan, accumulate, hidden)
    recording = read(tmp_path)
    kinds = {call.kind for calls in recording.ranks[0].programs.values() for call in calls}
    assert (WAIT in kinds) == hidden
    for step in recording.steps:
        over: dict = {}
        for _, taken in recording.of(step):
            assert bool(taken.waits) == plan.startswith("pp") and len(taken.links) == 3
            for block in taken.blocks:
                if block.collective:
                    over.setdefault(block.collective, []).append(block)
        for collective, blocks in over.items():
            ends = [b for b in blocks if b.call.kind == WAIT] or blocks
            assert len(ends) == len(collective.group) == (4 if hidden else 2)
            assert max(b.begin for b in blocks if b.call.axis) <= min(
                b.end for b in ends
            )  # none is over before all came
    diagnosis = diagnose(tmp_path)
    for share in diagnosis.shares:
        parts = itertools.chain(share.computing.values(), share.moving.values(), share.waiting.values())
        assert sum(parts) + share.passing + share.other == pytest.approx(share.seconds)
    assert json.loads((tmp_path / "simulated.json").read_text())["seconds"] > 0
