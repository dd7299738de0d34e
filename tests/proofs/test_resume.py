"""Claim: a run killed at any moment and started again gives the same losses, bit for bit, as one left alone."""

import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import TINY, places
from tutti.train import command
from tutti.train.configfile import parse
from tutti.train.text.history import read, series

TRAIN = [
    *TINY,
    *("--batch.size", "4", "--model.hidden-size", "32", "--model.num-attention-heads", "2"),
    *("--schedule.steps", "12", "--checkpoint.every", "3", "--eval.every", "6"),
]

# Runs `tutti train`, and kills itself: before step number `when`, or while writing the checkpoint of that step.
KILLED = """
import os, signal, sys
from tutti import cli
from tutti.checkpoint import folder
from tutti.train.text import run
what, when = sys.argv[1], int(sys.argv[2])
run_step, to_disk = run.Run.run_step, folder.to_disk
def killed_step(self, batch):
    if what == "step" and self.done == when:
        os.kill(os.getpid(), signal.SIGKILL)
    return run_step(self, batch)
def killed_save(path):
    if what == "save" and path.name == "manifest.json" and f"{when:08d}" in str(path):
        os.kill(os.getpid(), signal.SIGKILL)
    to_disk(path)
run.Run.run_step, folder.to_disk = killed_step, killed_save
sys.exit(cli.main(["train", *sys.argv[3:]]))
"""


def options(text: Path, out: Path, seed: int) -> list[str]:
    return [*places(text, out), "--seed", str(seed), *TRAIN]


def killed_run(text: Path, out: Path, seed: int, what: str, when: int) -> int:
    """Train in another process until it kills itself; its exit code."""
    line = [sys.executable, "-c", KILLED, what, str(when), *options(text, out, seed)]
    return subprocess.run(line, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "what"), [(0, "step"), (1, "step"), (2, "save")])
def test_killed_and_continued_is_the_same_as_left_alone(text, tmp_path, capfd, seed, what):
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    command.run(parse(options(text, alone, seed)))
    when = random.Random(seed).randrange(1, 12) if what == "step" else random.Random(seed).choice([3, 6, 9, 12])
    assert killed_run(text, killed, seed, what, when) == -signal.SIGKILL
    steps = len(series(read(killed), "loss")[0])
    assert steps == when or (what == "save" and steps > when), "it went on while the checkpoint was written"
    last = (when - 1) // 3 * 3 if what == "save" else when // 3 * 3
    capfd.readouterr()
    command.run(parse(options(text, killed, seed)))
    said = capfd.readouterr().out
    continued = [int(step) for step in re.findall("continuing after step ([0-9]+)", said)] or [0]
    assert continued in ([last], [max(last - 3, 0)]), "the newest, or where that was being written the one before"
    if what == "save":
        assert continued == [last] and f"the checkpoint of step {when} was not finished: skipped" in said
    for name in ("loss", "held_out_loss", "learning_rate"):
        assert series(read(killed), name) == series(read(alone), name)  # Python floats: equal to the last bit
    assert series(read(killed), "loss")[0] == list(range(1, 13))
    weights = "model/model.safetensors"
    assert (killed / weights).read_bytes() == (alone / weights).read_bytes()
