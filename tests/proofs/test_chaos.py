"""Claim: a job in which any rank is killed at any moment, while a checkpoint is written too, ends by itself with the
losses of a job that was left alone, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobs import TINY, places, ranks
from tutti.train.text.history import read, series

STEPS, EVERY = 24, 3
TRAIN = [
    *TINY,
    *("--batch.size", "4", "--model.hidden-size", "32", "--model.num-attention-heads", "2"),
    *("--schedule.steps", str(STEPS), "--checkpoint.every", str(EVERY), "--eval.every", "12"),
    *("--parallel.processes", "2", "--parallel.restarts", "3", "--parallel.plan", "zero3"),
]
PATIENCE = 300  # seconds: no run hangs


def start(text: Path, out: Path) -> subprocess.Popen:
    line = [sys.executable, "-m", "tutti.cli", "train", *places(text, out), *TRAIN]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TUTTI_PLANS": "off"}
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "alone"
    job = start(text, out)
    said, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, said
    return out


def steps_of(out: Path) -> int:
    return len(series(read(out), "loss")[0])


def wait_for(true, job: subprocess.Popen) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert job.poll() is None and time.monotonic() < end, "the job ended, or hangs"
        time.sleep(0.005)


def kill_one(text: Path, out: Path, seed: int) -> dict[str, float]:
    """Run a job and kill a rank at a moment; what was killed, and seconds until the first step after it."""
    draw = random.Random(seed)
    job, victim, when = start(text, out), draw.randrange(2), draw.randrange(1, STEPS - 1)
    if draw.random() < 0.5:  # while the checkpoint is written
        step = max(1, when // EVERY) * EVERY
        scratch = out / "checkpoints" / f".writing-step-{step:08d}"
        wait_for(lambda: scratch.exists() or steps_of(out) > step, job)
    else:
        wait_for(lambda: steps_of(out) >= when, job)
        time.sleep(draw.random() * 0.05)
    before, history = steps_of(out), out / "history.jsonl"
    file = history.stat().st_ino
    os.kill(ranks(job)[victim], signal.SIGKILL)
    killed = time.monotonic()
    wait_for(lambda: history.stat().st_ino != file, job)  # the ranks that were started anew go on with it
    resumed_step = steps_of(out)
    wait_for(lambda: steps_of(out) > resumed_step, job)
    seconds = time.monotonic() - killed
    said, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, said
    assert "restart 1 of 3, in 2 processes" in said
    return {"seed": seed, "rank": victim, "step": before, "seconds": round(seconds, 2)}


def check(text: Path, out: Path, alone: Path, seed: int) -> None:
    kill = kill_one(text, out, seed)
    print(json.dumps(kill))
    for name in ("loss", "held_out_loss"):
        assert series(read(out), name) == series(read(alone), name), kill


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_killed_rank_changes_nothing(text, alone, tmp_path, seed):
    check(text, tmp_path / "run", alone, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 20))
def test_twenty_killed_ranks_change_nothing(text, alone, tmp_path, seed):
    check(text, tmp_path / "run", alone, seed)
