"""Claim: a job that loses a process, or a machine with its memory, between two checkpoints on disk goes on from the
newest copy in memory: with the losses of a job that was left alone, bit for bit under the same plan, by the numbers law
on fewer machines."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import TINY, Machines, places
from tutti import cli
from tutti.train.text.history import read, series

STEPS = 16
TRAIN = [
    *TINY,
    *("--batch.size", "12", "--model.hidden-size", "48", "--model.num-attention-heads", "3"),
    *("--schedule.steps", str(STEPS), "--eval.every", "8", "--parallel.plan", "zero3"),
    *("--checkpoint.every", "100", "--checkpoint.memory-every", "2"),  # on disk the end alone
]

# Runs `tutti train`; its last rank kills itself before step 6, once.
KILLED = """
import os, signal, sys
from tutti.train import command
from tutti.train.text import run
from tutti.train.configfile import parse
run_step = run.Run.run_step
def killed(self, batch):
    if self.done == 6 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return run_step(self, batch)
run.Run.run_step = killed
command.run(parse(sys.argv[1:]))
"""


def left_alone(text: Path, out: Path, processes: int) -> Path:
    line = [*places(text, out), *TRAIN, "--checkpoint.memory-every", "0", "--parallel.processes", str(processes)]
    subprocess.run([sys.executable, "-m", "tutti.cli", "train", *line], check=True, capture_output=True)
    return out


def continued(said: str) -> int:
    """The step after which a job went on, from memory."""
    (step,) = {int(step) for step in re.findall(r"continuing after step (\d+), from memory", said)}
    return step


def same_losses(run: Path, alone: Path, rel: float = 0.0) -> bool:
    pairs = [(series(read(run), name), series(read(alone), name)) for name in ("loss", "held_out_loss")]
    return all(a[0] == b[0] and a[1] == pytest.approx(b[1], rel=rel, abs=0) for a, b in pairs)


@pytest.mark.slow
def test_a_killed_process_goes_on_from_memory_bit_for_bit(text, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TUTTI_MEMORY", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    out = tmp_path / "run"
    code = cli.main(["run", "-n", "2", "--restarts", "1", str(script), *places(text, out), *TRAIN])
    said = capfd.readouterr()
    assert code == 0, said
    assert continued(said.out) in (4, 6), "the copy of step 6 may be under way"
    assert same_losses(out, left_alone(text, tmp_path / "alone", 2))
    assert not list(tmp_path.glob("tutti-*")), "the end gives the memory back"


@pytest.mark.slow
@pytest.mark.parametrize("replaced", [True, False])
def test_a_lost_machine_goes_on_from_the_memory_of_others(text, tmp_path, replaced):
    machines, out = 3, tmp_path / "run"
    with Machines(text, out, machines if replaced else machines - 1, machines, TRAIN) as job:
        for _ in range(machines):
            job.add()
        job.wait_for(lambda: job.steps() >= 5, "three machines train")
        job.lose(1)
        lost = job.steps()
        if replaced:
            job.add()
        job.wait_for(lambda: job.machines[0].poll() is not None, "the end")
        said = job.said()
    assert job.machines[0].returncode == 0, said
    assert 4 <= continued(said) <= lost + 1
    assert f"on cpu:{machines if replaced else machines - 1};" in said
    assert same_losses(out, left_alone(text, tmp_path / "alone", machines), rel=0 if replaced else 1e-4)
