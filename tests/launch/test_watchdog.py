"""Jobs of Gloo processes in which one rank hangs: they end, and the error says which one and where."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import tutti
from cases import slow
from tutti.launch.heartbeat import HEARTBEAT
from tutti.launch.launch import LaunchError, launch, rank

HANG = 6.0  # seconds without progress
SINCE = r"for \d+ s"


def model_and_batch(layers: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(8, 8), nn.Tanh())))
    return model, (torch.randn(4, 8),)


def sleep(folder: str) -> None:
    time.sleep(600)


def stop(folder: str) -> None:
    """Be stopped, and go on when the other has ended, so that the launcher need not wait for long."""
    other, ours = Path(folder, f"pid-{1 - rank()}").read_text(), os.getpid()
    goes_on = f"trap '' TERM; while kill -0 {other} 2>/dev/null; do sleep 0.2; done; kill -CONT {ours}"
    subprocess.Popen(["sh", "-c", goes_on])
    os.kill(ours, signal.SIGSTOP)


def keep_the_interpreter(folder: str) -> None:
    """Hang in C without letting go of the interpreter's lock."""
    ctypes.PyDLL(None).sleep(600)


def train(fault: str, folder: str, plan: str, level: str, accumulate: int, hangs: int) -> None:
    """Two steps; before the third one rank comes to no more. The first, which compiles, takes as long as it takes."""
    torch.set_num_threads(1)
    model, batch = model_and_batch(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = tutti.parallelize(model, optimizer, batch, loss=lambda m, b: m(*b).square().mean(), plan=plan, level=level,
                             accumulate=accumulate)  # fmt: skip
    Path(folder, f"pid-{rank()}").write_text(str(os.getpid()))
    step(batch)
    with tutti.Watchdog(HANG, Path(folder, "stacks")):
        step(batch)
        if rank() == hangs:
            globals()[fault](folder)
        step(batch)


def message(tmp_path: Path, fault: str, plan="dp", level="O0", accumulate=1, hangs=1, processes=2) -> str:
    with pytest.raises(LaunchError) as caught:
        launch(train, processes, fault, str(tmp_path), plan, level, accumulate, hangs)
    assert caught.value.kind == "Hang" and caught.value.plain
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(("level", "plan", "meeting"), [
    ("O0", "dp", "all_reduce of .* over dp"),
    slow("O2", "tp", "all_(reduce|gather) of .* over tp"),
])  # fmt: skip
@pytest.mark.starts
def test_who_sleeps_in_its_data_is_named_with_the_collective_that_the_other_waits_in(tmp_path, level, plan, meeting):
    said = message(tmp_path, "sleep", plan, level)
    where = rf"between steps 2 and 3 {SINCE}, at .*test_watchdog.py:\d+ in sleep: time.sleep\(600\)"
    begin = rf"rank 1 of 2 has not reached {meeting} \(in step 3\): it has been {where}; rank 0 waits there {SINCE}\n"
    assert re.match(begin, said)
    stacks = {r: Path(tmp_path, "stacks", f"rank-{r}.txt").read_text() for r in range(2)}
    assert "in sleep" in stacks[1] and "in carry_out" in stacks[0] and "in sleep" not in stacks[0]


@pytest.mark.slow
def test_who_is_stopped_is_named_by_the_others(tmp_path):
    said = message(tmp_path, "stop")
    pid = Path(tmp_path, "pid-1").read_text()
    assert re.match(rf"rank 1 of 2 has not reached all_reduce of .* \(in step 3\): it has sent no heartbeat {SINCE}, "
                    rf"last .*: process {pid} of \S+ is stopped; rank 0 waits there {SINCE}\n", said)  # fmt: skip


@pytest.mark.slow
def test_who_keeps_the_store_is_named_when_it_is_stopped(tmp_path):
    said = message(tmp_path, "stop", hangs=0)
    assert re.match(
        rf"rank 0 of 2 has not reached all_reduce of .* \(in step 3\): it .*; rank 1 waits there {SINCE}\n", said
    )


@pytest.mark.slow
def test_who_keeps_the_interpreter_is_named_and_leaves_its_stacks(tmp_path):
    said = message(tmp_path, "keep_the_interpreter")
    assert "it has sent no heartbeat" in said and "lets no other thread run" in said
    assert "in keep_the_interpreter" in Path(tmp_path, "stacks", "rank-1.txt").read_text()


@pytest.mark.slow
def test_in_a_pipeline_the_message_that_others_wait_for_is_named(tmp_path):
    said = message(tmp_path, "sleep", "pp2", accumulate=2)
    assert re.match(
        rf"rank 1 of 2 has not reached \w+ of .* over pp \(in step 3\): .*; rank 0 waits there {SINCE}\n", said
    )


@pytest.mark.slow
def test_of_two_axes_the_one_is_named_along_which_ranks_wait(tmp_path):
    said = message(tmp_path, "sleep", "dp2xtp2", hangs=2, processes=4)
    assert re.match(r"rank 2 of 4 has not reached all_\w+ of .* over (dp|tp) .*; ranks? [0, 1]*waits? there for", said)


def slow_but_alive(folder: str) -> list[float]:
    """A job that takes much longer than a watchdog's patience in all, and where one rank compiles for longer."""
    torch.set_num_threads(1)
    model, batch = model_and_batch(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = tutti.parallelize(model, optimizer, batch, loss=lambda m, b: m(*b).square().mean(), plan="dp", level="O0")
    step.evaluate(batch)
    losses = []
    with tutti.Watchdog(HANG, Path(folder, "stacks")):
        for _ in range(8):
            losses.append(step(batch).item())
            time.sleep(HANG / 12)
        if rank() == 1:
            with HEARTBEAT.working("compiles"):
                time.sleep(1.2 * HANG)
        for _ in range(8):
            losses.append(step.evaluate(batch).item())
            time.sleep(HANG / 12)
    return losses


@pytest.mark.slow
def test_what_takes_long_is_no_hang(tmp_path, capfd):
    first, second = launch(slow_but_alive, 2, str(tmp_path))
    assert first == second and len(first) == 16
    assert not Path(tmp_path, "stacks").exists()
    assert capfd.readouterr().err == ""


def once(folder: str) -> str:
    """Rank 1 hangs when it is started first."""
    torch.distributed.init_process_group("gloo")
    with tutti.Watchdog(HANG, folder):
        if rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            time.sleep(600)
        with HEARTBEAT.within("all_reduce", "a number"):
            torch.distributed.all_reduce(torch.ones(1))
    return os.environ["TORCHELASTIC_RESTART_COUNT"]


@pytest.mark.slow
def test_a_job_that_hangs_starts_anew_and_its_stacks_stay(tmp_path):
    assert launch(once, 2, str(tmp_path / "stacks"), restarts=1) == ["1", "1"]
    assert "in once" in Path(tmp_path, "stacks", "rank-1.txt").read_text()


SCRIPT = """
import time, torch, tutti
torch.manual_seed(0)
model, batch = torch.nn.Linear(4, 4), (torch.randn(4, 4),)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = tutti.parallelize(model, optimizer, batch, loss=lambda m, b: m(*b).sum(), plan="dp", level="O0")
step(batch)
if torch.distributed.get_rank() == 1:
    time.sleep(600)
step(batch)
"""


@pytest.mark.slow
def test_a_script_under_tutti_run_is_watched(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    line = [sys.executable, "-m", "tutti.cli", "run", "-n", "2", "--hang", "6", "script.py"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    first, second = done.stderr.splitlines()
    where = r"script.py:9 in <module>: time.sleep\(600\); rank 0 waits there"
    assert re.match(rf"tutti run: rank 1 of 2 has not reached all_reduce of .* {where} {SINCE}$", first)
    assert second == "  stacks of all threads: stacks/rank-*.txt"
    assert 'script.py", line 9 in <module>' in (tmp_path / "stacks" / "rank-1.txt").read_text()
