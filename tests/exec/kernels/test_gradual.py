"""Level "auto": the calls of an executor change from operators to compiled functions, and a later run follows."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import tutti
from tutti.compile import background
from tutti.compile.compiled import Compiled, Described
from tutti.exec.kernels import gradual
from tutti.exec.kernels.gradual import Gradual


def step(plan="dp2", cluster="cpu:2", level="auto", seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return tutti.parallelize(model, optimizer, batch(), loss=loss, plan=plan, cluster=cluster, level=level)


def loss(model, batch):
    return model(batch[0]).square().mean()


def batch():
    return (torch.randn(8, 8, generator=torch.Generator().manual_seed(1)),)


class Scripted:
    """Executors of which each level takes some seconds, on a clock of this test."""

    def __init__(self, monkeypatch, plain, compiled, cores=gradual.ROOM):
        self.seconds, self.now, self.requested = {"O0": plain, "O2": compiled}, 0.0, []
        monkeypatch.setattr(gradual.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(gradual, "start", lambda functions: Done())
        monkeypatch.setattr(gradual, "_jobs", [])
        monkeypatch.setattr(gradual, "PATIENCE", 5.0)
        monkeypatch.setattr(gradual, "cores", lambda: cores)

    def make(self, level):
        self.requested.append(level)
        return Level(level)

    def run(self, calls, chosen, first=1):
        levels = []
        for call in range(first, first + calls):
            level = chosen.executor(call).level
            with chosen.timed(call):
                self.now += self.seconds[level]
            levels.append(level)
        return levels


class Level:
    fails = False

    def __init__(self, level):
        self.level = level

    def uncompiled(self, like):
        return [(None, ())]

    def compile_like(self, like):
        if self.fails:
            raise RuntimeError("no compiler")


class Done:
    done, failed = True, ""

    def stop(self):
        pass


@pytest.mark.parametrize(("compiled", "last"), [(0.5, "O2"), (2.0, "O0")])
def test_the_faster_level_is_kept(monkeypatch, caplog, compiled, last):
    caplog.set_level(logging.INFO, "tutti")
    scripted = Scripted(monkeypatch, 1.0, compiled)
    chosen = Gradual(scripted.make)
    levels = scripted.run(40, chosen)
    begin = gradual.LOOK * 3  # patience ends after 5 calls, which is noticed at 8, and at 12 that it is compiled
    trial = ["O0", "O2", *["O0", "O2"] * gradual.TIMED]
    assert levels[:begin] == ["O0"] * begin and levels[begin : begin + len(trial)] == trial
    assert set(levels[begin + len(trial) :]) == {last} and chosen.phase == "decided"
    assert chosen.changes[0] == (begin + 2, "O2")
    assert f"level auto: {last} from call" in caplog.text


def test_with_few_cores_nothing_runs_while_it_compiles(monkeypatch):
    scripted = Scripted(monkeypatch, 1.0, 0.5, cores=gradual.ROOM - 1)
    monkeypatch.setattr(gradual, "start", None)
    begin = gradual.LOOK * 2
    levels = scripted.run(20, Gradual(scripted.make))
    assert levels == ["O0"] * begin + ["O0", "O2", *["O0", "O2"] * gradual.TIMED] + ["O2"] * (18 - begin - 6)


def test_short_runs_compile_nothing(monkeypatch):
    scripted = Scripted(monkeypatch, 0.1, 0.1)
    assert set(scripted.run(40, Gradual(scripted.make))) == {"O0"} and scripted.requested == ["O0"]


def test_a_later_run_changes_at_the_same_calls(monkeypatch):
    scripted = Scripted(monkeypatch, 1.0, 2.0)
    first = Gradual(scripted.make)
    levels = scripted.run(30, first)
    for begin in (1, 10, 17, 25):
        again = Gradual(scripted.make, first.changes)
        assert scripted.run(31 - begin, again, begin) == levels[begin - 1 :]


def test_a_compiler_that_fails_is_a_warning(monkeypatch, caplog):
    scripted = Scripted(monkeypatch, 1.0, 0.5)
    monkeypatch.setattr(Done, "failed", "no space left")
    assert scripted.run(40, Gradual(scripted.make))[-1] == "O2"
    assert "compiling beside the first steps failed (no space left)" in caplog.text


def test_where_compilation_fails_the_run_goes_on_operator_by_operator(monkeypatch, caplog):
    scripted = Scripted(monkeypatch, 1.0, 0.5)
    monkeypatch.setattr(Level, "fails", True)
    chosen = Gradual(scripted.make)
    assert set(scripted.run(40, chosen)) == {"O0"} and chosen.phase == "decided"
    assert "O0 to the end, because compilation failed (RuntimeError: no compiler)" in caplog.text


def test_one_process_compiles_at_a_time(monkeypatch):
    scripted = Scripted(monkeypatch, 1.0, 0.5)
    monkeypatch.setattr(Done, "done", False)
    first, second = Gradual(scripted.make), Gradual(scripted.make)
    assert set(scripted.run(20, first)) == {"O0"}
    scripted.run(20, second)
    assert (first.phase, second.phase) == ("compiling", "plain")
    monkeypatch.setattr(Done, "done", True)
    assert scripted.run(40, second, 21)[-1] == "O2"


@pytest.mark.starts
def test_steps_are_those_of_each_level_and_a_checkpoint_has_the_change(monkeypatch, tmp_path):
    monkeypatch.setattr(gradual, "PATIENCE", 0.0)
    monkeypatch.setattr(gradual, "ROOM", 0)  # so another process compiles
    live = step()
    losses = losses_of(live, 1)
    (chosen,) = live._executables.gradual.values()
    while chosen.phase != "decided":
        losses += losses_of(live, 1)
        assert len(losses) < 100_000, "compilation does not end"
    first = chosen.changes[0][0]
    assert chosen.changes[0][1] == "O2" and losses[: first - 1] == losses_of(step(level="O0"), first - 1)
    checkpoints = tutti.Checkpoints(tmp_path)
    live.save(checkpoints)
    again = step(seed=3)
    again.load(checkpoints.wait())
    assert losses_of(again, 3) == losses_of(live, 3)
    assert again._executables.level_changes() == live._executables.level_changes() != {}


def losses_of(step, count):
    return [step(batch()).item() for _ in range(count)]


def on_ranks(plan):
    """The changes of levels of this rank, and a loss after them. Patience ends after the first calls."""
    patience, gradual.PATIENCE = gradual.PATIENCE, 0.0
    try:
        auto_step = step(plan, "auto")
        losses = losses_of(auto_step, 1)
        (chosen,) = auto_step._executables.gradual.values()
        while chosen.phase != "decided":
            losses += losses_of(auto_step, 1)
            assert len(losses) < 100_000, "compilation does not end"
        return chosen.changes, losses_of(auto_step, 1)
    finally:
        gradual.PATIENCE = patience


@pytest.mark.parametrize("plan", ["zero3", "dp2xtp2"])
def test_ranks_change_at_the_same_call(pool, plan):
    (first, *others) = pool.run(on_ranks, plan)
    assert first[0][0][1] == "O2" and all(other == first for other in others)


def traced(function, *args):
    from tutti import compat
    from tutti.tracing.trace.trace import trace

    with compat.fake_mode():
        return trace(function, *(torch.empty(x.shape) for x in args)).graph


@pytest.mark.starts
def test_another_process_compiles_into_the_cache(monkeypatch, tmp_path):
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x, y = torch.randn(64, 64), torch.randn(64, 64)
    compiled = Compiled(traced(lambda x, y: ((x @ y).sin().sum(1),), x, y))
    job = background.start([(compiled, [Described.of(x), Described.of(y)])])
    job.process.wait()
    assert job.done and job.failed == ""
    job.stop()
    counters.clear()
    torch.testing.assert_close(compiled(x, y)[0], (x @ y).sin().sum(1))
    assert counters["inductor"]["fxgraph_cache_hit"] == 1 and counters["inductor"]["fxgraph_cache_miss"] == 0
