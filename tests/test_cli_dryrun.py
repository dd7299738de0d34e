"""`tutti dryrun` as a command, in this process."""

from __future__ import annotations

import json

import pytest
import torch

import tutti
from tutti import cli
from tutti.hardware import Cluster
from tutti.plan.explain import seconds, size
from tutti.plan.planner import Planner
from tutti.sim.dryrun import dry_run
from tutti.sim.error_bars import DENSE, MEMORY, spread
from tutti.sim.restart import Storage, restart
from tutti.tracing.load import load

OPTIONS = ("--batch", "8", "--seq", "32")


def run(capsys, *arguments) -> tuple[int, str, str]:
    code = cli.main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def graph(model):
    network, batch = load(str(model), 8, 32)
    return tutti.capture(network, batch, torch.optim.AdamW(network.parameters(), lr=1e-3), fp32_master_weights=True)


@pytest.fixture(scope="module")
def plan(graph, tmp_path_factory):
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    Planner(graph, Cluster.parse("h100:4")).named("dp2xtp2").save(file)
    return file


def test_prints_what_the_simulation_found_and_writes_both_files(model, graph, plan, tmp_path, capsys):
    trace, picture, memory = tmp_path / "trace.json", tmp_path / "step.svg", tmp_path / "memory.svg"
    files = ("--timeline", trace, "--gantt", picture, "--memory", memory)
    code, out, err = run(capsys, "dryrun", plan, "--model", model, *OPTIONS, *files)
    assert code == 0, err
    prediction = dry_run(graph, tutti.Plan.load(plan), Cluster.parse("h100:4"), "O2")
    exposed = sum(row[3] for row in prediction.communication().values())
    assert out.startswith("plan dp2xtp2 at O2 on h100:4: dp 2 x tp 2\n")
    off = spread(DENSE, prediction.cluster)
    assert (
        f"{seconds(prediction.seconds)}{off}: {seconds(prediction.compute)} computing, {seconds(exposed)} waiting"
        in out
    )
    assert f"{100 * prediction.fraction_of_peak:.1f} %" in out
    assert f"{size(prediction.memory.peak)}{spread(MEMORY, prediction.cluster)} per device at the peak\n" in out
    for (kind, axis), (count, sent, *_) in prediction.communication().items():
        row = next(line for line in out.splitlines() if f"{kind} over {axis}" in line)
        assert row.split()[3] == str(count) and size(sent) in row
    assert prediction.slowest()[0][0] in out and prediction.memory.alive[0].label in out
    assert out.splitlines()[-3:] == [f"saved {trace}", f"saved {picture}", f"saved {memory}"]
    assert len(json.loads(trace.read_text())["traceEvents"]) > 100
    assert "<svg" in picture.read_text() and "optimizer state" in memory.read_text()


def test_level_overlap_and_another_cluster(model, plan, capsys):
    def step(*more):
        code, out, err = run(capsys, "dryrun", plan, "--model", model, *OPTIONS, *more)
        assert code == 0, err
        line = next(line for line in out.splitlines() if line.startswith("step"))
        number, unit = line.split(":")[0].split()[1:3]
        return float(number) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[unit]

    plain = step()
    assert step("--level", "O0") > plain
    assert plain <= step("--overlap", "yes") <= step("--overlap", "no")
    assert step("--cluster", "v100-32:4") > plain


def test_what_a_restart_reads(model, graph, plan, tmp_path, capsys):
    before = tmp_path / "before.json"
    Planner(graph, Cluster.parse("h100:8"), ()).named("zero3").save(before)
    options = ("--restart", "--before", before, "--storage.process", "1e3")
    code, out, err = run(capsys, "dryrun", plan, "--model", model, *OPTIONS, *options)
    assert code == 0, err
    prediction = restart(graph, tutti.Plan.load(plan), 4, tutti.Plan.load(before), Storage(process=1e3))
    assert f"restart    {size(prediction.state)} of state, on 1 machines\n" in out
    row = next(line for line in out.splitlines() if "per device" in line)
    assert row.split()[2:] == [*size(prediction.devices[0]).split()] * 3
    assert (
        f"{seconds(max(prediction.devices) / 1e3)} to read" in out and f"each byte {prediction.times:.2f} times" in out
    )


def test_a_plan_for_another_batch_is_told(model, plan, capsys):
    code, out, _ = run(capsys, "dryrun", plan, "--model", model, "--batch", "4", "--seq", "16")
    assert code == 0 and out.startswith("the plan was made for another step: another model, batch")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--cluster", "h100:8"], "the plan is for 4 devices, h100:8 has 8"),
        (["--level", "O3"], "unknown level 'O3'; expected one of O0, O1, O2"),
        (["--gantt", "step.gif"], "must end in .svg, .png, .pdf"),
        (["--optimizer", "sgd"], "the plan was made for an optimizer that keeps"),
        (["--before", "plan.json"], "--before and --storage apply to a restart only: add --restart"),
        (["--dtype", "float16"], "unknown dtype 'float16'; expected one of float32, bfloat16"),
    ],
)
def test_errors_are_one_line(model, plan, capsys, more, message):
    code, _, err = run(capsys, "dryrun", plan, "--model", model, *OPTIONS, *more)
    assert code == 2 and message in err and len(err.splitlines()) == 1


def test_a_file_that_is_no_plan(model, tmp_path, capsys):
    file = tmp_path / "plan.json"
    file.write_text("[]")
    code, _, err = run(capsys, "dryrun", file, "--model", model)
    assert code == 2 and err.startswith(f"tutti dryrun: {file}: not a plan")
    assert run(capsys, "dryrun", tmp_path / "none.json", "--model", model)[0] == 2


def test_a_plan_without_a_cluster(model, plan, tmp_path, capsys):
    file = tmp_path / "plan.json"
    tutti.Plan.load(plan).replace(cluster="").save(file)
    code, _, err = run(capsys, "dryrun", file, "--model", model)
    assert code == 2 and err == f"tutti dryrun: {file} names no cluster: add --cluster, for instance --cluster h100:8\n"


def test_the_help_says_what_each_option_does(capsys):
    assert cli.main(["dryrun", "--help"]) == 0
    out = capsys.readouterr().out
    assert "ui.perfetto.dev" in out and "--overlap" in out
