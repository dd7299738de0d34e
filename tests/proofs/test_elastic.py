"""Claim: when machines are lost or gained in the middle of training, the job goes on with those there are, re-planned,
on the same samples: the losses are those of a run that was left alone, by the numbers law."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobs import TINY, places
from tutti.train.history import read, series

STEPS = 40
TRAIN = [
    *TINY,
    *("--batch.size", "12", "--model.hidden-size", "48", "--model.num-attention-heads", "3"),
    *("--schedule.steps", str(STEPS), "--checkpoint.every", "2", "--eval.every", "20", "--parallel.plan", "zero3"),
]
PATIENCE = 400  # seconds

# Training that takes its time, so that there is a middle.
SLOW = """
import sys, time
from tutti import cli
from tutti.train import trainer
advance = trainer.Trainer._advance
def slow(self, rate):
    time.sleep(0.5)
    return advance(self, rate)
trainer.Trainer._advance = slow
sys.exit(cli.main(["train", *sys.argv[1:]]))
"""


class Job:
    """Machines of one process each, all of them here."""

    def __init__(self, text: Path, out: Path, script: Path):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            meet = f"localhost:{free.getsockname()[1]}"
            run = [
                "run",
                "--min",
                "2",
                "--max",
                "4",
                "--restarts",
                "9",
                "--meet",
                meet,
                str(script),
                *places(text, out),
                *TRAIN,
            ]
        self.line, self.out, self.machines = [sys.executable, "-m", "tutti.cli", *run], out, []

    def add(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TUTTI_PLANS": "off"}
        with open(self.out.with_name(f"machine-{len(self.machines)}.log"), "w") as log:
            made = subprocess.Popen(self.line, stdout=log, stderr=subprocess.STDOUT, env=environment)
        self.machines.append(made)

    def wait_for(self, true, what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not true():
            assert time.monotonic() < end, f"{what}\n{self.said()}"
            time.sleep(0.1)

    def steps(self) -> int:
        return max(series(read(self.out), "loss")[0], default=0)

    def said(self) -> str:
        logs = sorted(self.out.parent.glob("machine-*.log"))
        return "\n".join(f"{log.name}: {log.read_text()}" for log in logs)


@pytest.mark.slow
def test_machines_come_and_go(text, tmp_path):
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    job = Job(text, tmp_path / "run", script)
    try:
        for _ in range(4):
            job.add()
        job.wait_for(lambda: job.steps() >= 6, "four machines train")
        job.machines[3].send_signal(signal.SIGKILL)
        lost = job.steps()
        job.wait_for(lambda: job.said().count("on cpu:3;") == 1 and job.steps() >= lost + 6, "three go on")
        job.add()
        gained = job.steps()
        job.wait_for(lambda: job.said().count("on cpu:4;") == 2 and job.steps() >= gained + 4, "four again")
        job.wait_for(lambda: job.machines[0].poll() is not None, "the end")
        assert job.machines[0].returncode == 0, job.said()
    finally:
        for machine in job.machines:
            machine.kill()
            machine.wait()
    alone = tmp_path / "alone"
    subprocess.run(
        [sys.executable, "-m", "tutti.cli", "train", *places(text, alone), *TRAIN], check=True, capture_output=True
    )
    for name in ("loss", "held_out_loss"):
        (steps, found), (expected_steps, expected) = series(read(tmp_path / "run"), name), series(read(alone), name)
        assert steps == expected_steps and found == pytest.approx(expected, rel=1e-4)
