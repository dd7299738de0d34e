"""Claim: a run killed at any moment and started again gives the same losses, bit for bit, as one left alone."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tutti.train import command
from tutti.train.configfile import parse
from tutti.train.history import read, series

TRAIN = [
    *("--data.held-out", "0.2", "--tokenizer.vocab-size", "300", "--batch.size", "4", "--batch.seq", "16"),
    *("--model.hidden-size", "32", "--model.num-hidden-layers", "2", "--model.num-attention-heads", "2"),
    *("--schedule.steps", "12", "--schedule.warmup", "2", "--checkpoint.every", "3", "--eval.every", "6"),
    *("--eval.batches", "2", "--parallel.level", "O0", "--parallel.precision", "float32", "--sample.tokens", "2"),
]

# Runs `tutti train`, and kills itself: before step number `when`, or while writing the checkpoint of that step.
KILLED = """
import os, signal, sys
from tutti import cli
from tutti.train import checkpoint, trainer
what, when = sys.argv[1], int(sys.argv[2])
advance, to_disk = trainer.Trainer._advance, checkpoint._to_disk
def killed_step(self, rate):
    if what == "step" and self.done == when:
        os.kill(os.getpid(), signal.SIGKILL)
    return advance(self, rate)
def killed_save(path):
    if what == "save" and path.name == trainer.STATE and f"{when:08d}" in str(path):
        os.kill(os.getpid(), signal.SIGKILL)
    to_disk(path)
trainer.Trainer._advance, checkpoint._to_disk = killed_step, killed_save
sys.exit(cli.main(["train", *sys.argv[3:]]))
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for i in range(30):
        (folder / f"{i:02}.py").write_text("".join(f"def f_{i}_{j}(x):\n    return x * {i + j}\n\n" for j in range(12)))
    return folder


def options(text: Path, out: Path, seed: int) -> list[str]:
    where = ["--data.source", str(text), "--data.cache", str(text.parent / "cache"), "--out", str(out)]
    return [*where, "--seed", str(seed), *TRAIN]


def run(text: Path, out: Path, seed: int, kill: tuple[str, int] = ("never", 0)) -> subprocess.CompletedProcess:
    line = [sys.executable, "-c", KILLED, kill[0], str(kill[1]), *options(text, out, seed)]
    return subprocess.run(line, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize(("seed", "what"), [(0, "step"), (1, "step"), (2, "save")])
def test_killed_and_continued_is_the_same_as_left_alone(text, tmp_path, seed, what):
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    command.run(parse(options(text, alone, seed)))
    when = random.Random(seed).randrange(1, 12) if what == "step" else random.Random(seed).choice([3, 6, 9, 12])
    assert run(text, killed, seed, (what, when)).returncode == -signal.SIGKILL
    assert len(series(read(killed), "loss")[0]) == when
    last = (when - 1) // 3 * 3 if what == "save" else when // 3 * 3
    again = run(text, killed, seed)
    assert again.returncode == 0, again.stderr
    assert ("continuing after step" in again.stdout) == (last > 0)
    assert f"continuing after step {last}" in again.stdout or last == 0
    assert (f"the checkpoint of step {when} was not finished: skipped" in again.stdout) == (what == "save")
    for name in ("loss", "held_out_loss", "learning_rate"):
        assert series(read(killed), name) == series(read(alone), name)  # Python floats: equal to the last bit
    assert series(read(killed), "loss")[0] == list(range(1, 13))
    weights = "checkpoints/step-00000012/model.safetensors"
    assert (killed / weights).read_bytes() == (alone / weights).read_bytes()
