"""The benchmark against published runs: the table agrees with itself, and the parts of a step with closed forms."""

import importlib
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def sc21():
    sys.path.insert(0, str(PATH))
    try:
        yield importlib.import_module("sc21")
    finally:
        sys.path.remove(str(PATH))


@pytest.fixture(scope="module")
def tiny(sc21):
    """A stage of two layers of a small run on two nodes, tensor parallelism inside of them."""
    run = replace(sc21.RUNS[4], heads=16, hidden=512, layers=4, devices=32, batch=24, microbatch=2)
    assert (run.dp, run.microbatches, run.stage) == (2, 6, 2)
    return sc21.Stage(run, 2)


def test_the_table_agrees_with_itself(sc21):
    """Sizes by the paper's formula; petaFLOP/s are those of all GPUs, to the digits that are printed."""
    for run in sc21.RUNS:
        assert run.parameters / 1e9 == pytest.approx(run.billions, abs=0.06)
        assert run.petaflops == pytest.approx(run.published * run.devices / 1e3, rel=0.5 / 130)
        assert run.dp * run.tp * run.pp == run.devices
        assert run.microbatches * run.microbatch * run.dp == run.batch
        assert run.stage * run.pp == run.layers and run.stage % run.chunks == 0
        assert run.chunks == 1 or run.microbatches % run.pp == 0  # which the interleaved schedule asks for


def test_residuals_are_all_reduced_as_in_megatron(sc21, tiny):
    """Two all-reduces of a microbatch's activations forward and two backward in each layer, and nothing else."""
    size = 2 * tiny.run.microbatch * sc21.TOKENS * tiny.run.hidden
    all_reduce = 2 * (tiny.run.tp - 1) * size // tiny.run.tp
    large = [
        c for c in tiny.dry_run_of_stage.parts[0].program.collectives if ".h." in c.label and c.bytes > size // 100
    ]
    assert {(c.kind, c.axis, c.bytes) for c in large} == {("all_reduce", "tp", all_reduce)}
    assert Counter("/forward/" in c.label for c in large) == {True: 2 * tiny.layers, False: 2 * tiny.layers}


def test_parts_of_a_stage_are_the_simulated_step(sc21, tiny):
    """All of the simulated step but the copies that Megatron-LM does not make."""
    once = tiny.seconds()
    m = tiny.run.microbatches
    counted = m * sum(once[name] for name in ("forward", "backward", "ends", "sums")) + once["update"] + once["reduce"]
    copies = sum(
        part.runs * task.seconds
        for part in tiny.dry_run_of_stage.parts
        for task in part.simulation.tasks[0]
        if task.name.startswith("copy for ")
    )
    assert counted + copies == pytest.approx(tiny.dry_run_of_stage.seconds, rel=1e-9)


def test_deeper_models_are_scaled_by_layers(sc21, tiny):
    run = replace(tiny.run, layers=8)
    scaled, whole = (sc21.step(sc21.Stage(run, layers)) for layers in (2, 4))
    assert sum(scaled.values()) == pytest.approx(sum(whole.values()), rel=0.02)
    assert scaled["forward"] == pytest.approx(whole["forward"], rel=0.02)


def test_a_pipeline_adds_its_bubble_and_sends(sc21):
    cluster = sc21.a100s(1536)
    run = sc21.RUNS[6]
    added = sc21.pipelined(run, 0.2, 0.3, 0.0, cluster)
    size = 2 * run.microbatch * 2048 * run.hidden
    send = cluster.time("ppermute", size / 8, 24 * 8, 8)
    assert send > size / 8 / 25e9
    hop = send + cluster.time("all_gather", size * 7 / 8, 1, 8)
    assert added["sends"] == pytest.approx(2 * 48 * 2 * hop)
    assert added["bubble"] == pytest.approx(7 / 2 * 0.5 + 7 * 2 * hop), "the closed form, and sends that are waited for"
    later = sc21.pipelined(run, 0.2, 0.3, 0.1, cluster)
    assert 0 < later["bubble"] < added["bubble"], "the others wait for the head"
    assert sc21.pipelined(sc21.RUNS[0], 0.2, 0.3, 0.1, cluster) == {}


def test_gradients_are_hidden_by_one_kind_of_data_parallelism_alone(sc21, tiny):
    hidden = sc21.Stage(replace(tiny.run, hides=True), 2)
    hidden.__dict__["dry_run_of_stage"] = tiny.dry_run_of_stage
    open_, hid = sc21.step(tiny), sc21.step(hidden)
    once = tiny.seconds()
    behind = once["backward"] + once["forward"] + sc21.dropped(tiny.run, tiny.dry_run_of_stage.cluster)
    assert open_["reduced"] == once["reduce"] > 0
    assert hid["reduced"] == max(0.0, once["reduce"] - behind)
    assert {k: v for k, v in open_.items() if k != "reduced"} == {k: v for k, v in hid.items() if k != "reduced"}


def test_shares_that_made_a_time_are_found_again(sc21, tiny, monkeypatch):
    """Two runs whose published speed is what known shares predict."""
    shares = sc21.Shares(0.7, 0.6)
    larger = sc21.Stage(replace(tiny.run, hidden=1024, heads=8), 2)
    stages = {}
    for stage in (tiny, larger):
        run = replace(stage.run, published=sc21.teraflops(stage, shares))
        stages[run] = sc21.Stage(run, 2)
        stages[run].__dict__["dry_run_of_stage"] = stage.dry_run_of_stage
    fitted = sc21.fit(stages, tuple(stages))
    assert (fitted.matmul, fitted.memory) == pytest.approx((0.7, 0.6), rel=1e-2)


def test_bus_bandwidth_inside_a_node_is_what_was_measured(sc21):
    """232.5 GB/s of eight A100s on NVSwitch, all-reduces of up to 4 GB: NVIDIA/nccl issue 1048."""
    assert sc21.bus_bandwidth(8, 4 * 2**30) == pytest.approx(232.5e9, rel=0.05)
