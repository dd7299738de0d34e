"""Claim: a job of `tutti launch` that is preempted, loses a rank or loses a node goes on from its last checkpoint, on
Slurm and on Ray, and ends with the losses of a run that was left alone, bit for bit on the same number of ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import PATIENCE, TINY, places
from slurm_cluster import SlurmCluster, missing
from tutti.train.history import read, series

STEPS = 240
TRAIN = [
    *TINY,
    *("--batch.size", "12", "--model.hidden-size", "48", "--model.num-attention-heads", "3"),
    *("--schedule.steps", str(STEPS), "--checkpoint.every", "25", "--eval.every", "120", "--parallel.plan", "zero3"),
]
NAMES = "loss", "held_out_loss", "learning_rate"
CPU = {"OMP_NUM_THREADS": "1", "TUTTI_PLANS": "off"}


def tutti(*words: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-m", "tutti.cli", *words], capture_output=True, text=True,
                          env={**(environment or os.environ), **CPU})  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory) -> Path:
    """The run that was left alone, on two ranks."""
    out = tmp_path_factory.mktemp("alone") / "run"
    tutti("run", "-n", "2", "-m", "tutti.cli", "train", *places(text, out), *TRAIN)
    return out


def steps(out: Path) -> int:
    """The steps that a run has done."""
    return max(series(read(out), "loss")[0], default=0)


def wait_for(true: Callable[[], bool], what: str, said: Callable[[], str] = str) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, f"{what}\n{said()}"
        time.sleep(0.05)


def processes_of(rank: int, out: Path) -> list[int]:
    """The processes of a rank of the run that writes into a folder."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words, variables = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(out).encode() in words and f"RANK={rank}".encode() in variables:
            found.append(int(folder.name))
    return found


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_slurm(text, alone, tmp_path):
    out, folder = tmp_path / "a run", tmp_path / "job"
    with SlurmCluster(tmp_path / "slurm") as cluster:
        options = ["--slurm", "--nodes", "2", "--time", "60", "--grace", "30", "--folder", str(folder)]
        done = tutti("launch", *options, "--", "train", *places(text, out), *TRAIN, environment=cluster.environment)
        job = done.stdout.split()[1].rstrip(",")

        def said() -> str:
            logs = sorted(folder.glob("logs/**/*.txt"))
            return "\n".join([*(f"{x}:\n{x.read_text()}" for x in logs), cluster.logs()])

        def log() -> str:
            return (folder / "logs" / f"{job}.txt").read_text()

        wait_for(lambda: steps(out) >= 60, "it trains", said)
        cluster.call("scancel", "--signal=TERM", job)
        wait_for(lambda: "stopped with status 143; requeued" in log(), "it requeues itself", said)
        stopped = steps(out)
        assert 60 <= stopped < STEPS
        wait_for(lambda: steps(out) >= stopped + 40, "it goes on", said)
        os.kill(processes_of(1, out)[0], signal.SIGKILL)
        restarted = folder / "logs" / job / "attempt-1" / "rank-1.restart-1.txt"
        wait_for(restarted.exists, "its ranks are started again", said)
        killed = steps(out)
        wait_for(lambda: steps(out) >= killed + 40, "it goes on after a rank was killed", said)
        cluster.call("scontrol", "requeue", job)
        wait_for(lambda: cluster.state(job) == "COMPLETED", "the end", said)
        first = [(folder / "logs" / job / f"attempt-{i}" / "rank-0.txt").read_text() for i in range(3)]
        assert f"continuing after step {stopped}," in first[1], "the checkpoint of the signal, not an earlier one"
        assert "continuing after step" in first[2] and "continuing after step" not in first[0]
    for name in NAMES:
        assert series(read(out), name) == series(read(alone), name), said()
    assert series(read(out), "loss")[0] == list(range(1, STEPS + 1))
