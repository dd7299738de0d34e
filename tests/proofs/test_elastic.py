"""Claim: when machines are lost or gained in the middle of training, the job goes on with those there are, re-planned,
on the same samples: the losses are those of a run that was left alone, by the numbers law."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from jobs import TINY, Machines, places
from tutti.train.text.history import read, series

STEPS = 40
TRAIN = [
    *TINY,
    *("--batch.size", "12", "--model.hidden-size", "48", "--model.num-attention-heads", "3"),
    *("--schedule.steps", str(STEPS), "--checkpoint.every", "2", "--eval.every", "20", "--parallel.plan", "zero3"),
]


@pytest.mark.slow
def test_machines_come_and_go(text, tmp_path):
    with Machines(text, tmp_path / "run", 2, 4, TRAIN) as job:
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
    alone = tmp_path / "alone"
    subprocess.run(
        [sys.executable, "-m", "tutti.cli", "train", *places(text, alone), *TRAIN], check=True, capture_output=True
    )
    for name in ("loss", "held_out_loss"):
        (steps, values), (expected_steps, expected) = series(read(tmp_path / "run"), name), series(read(alone), name)
        assert steps == expected_steps and values == pytest.approx(expected, rel=1e-4)
