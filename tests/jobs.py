"""The options of tiny training jobs that proofs start, kill and start again."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tutti.train.text.history import read, series

TINY = [
    *("--data.held-out", "0.2", "--tokenizer.vocab-size", "300", "--batch.seq", "16", "--model.num-hidden-layers", "2"),
    *("--schedule.warmup", "2", "--eval.batches", "2", "--parallel.level", "O0", "--parallel.precision", "float32"),
    *("--sample.tokens", "2"),
]


def places(text: Path, out: Path) -> list[str]:
    """Where a job finds its text, and where it writes."""
    return ["--data.source", str(text), "--data.cache", str(text.parent / "cache"), "--out", str(out)]


PATIENCE = 400  # seconds

# Training that takes its time, so that there is a middle.
SLOW = """
import sys, time
from tutti import cli
from tutti.train.text import run
run_step = run.Run.run_step
def slow(self, batch):
    time.sleep(0.5)
    return run_step(self, batch)
run.Run.run_step = slow
sys.exit(cli.main(["train", *sys.argv[1:]]))
"""


def ranks(job: subprocess.Popen) -> dict[int, int]:
    """Process ids of a job's ranks."""
    pids = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            variables = (folder / "environ").read_bytes().split(b"\0") if parent == job.pid else []
        except OSError:
            continue
        numbers = [int(v.partition(b"=")[2]) for v in variables if v.startswith(b"RANK=")]
        pids |= {rank: int(folder.name) for rank in numbers}
    return pids


class Machines:
    """A job on `least` to `most` machines of one process each, all of them here, each with a memory of its own."""

    def __init__(self, text: Path, out: Path, least: int, most: int, options: Sequence[str]):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            self.port = free.getsockname()[1]
        script = out.with_name("slow.py")
        script.write_text(SLOW)
        meet = f"localhost:{self.port}"
        run = ["run", "--min", str(least), "--max", str(most), "--restarts", "9", "--meet", meet, str(script)]
        self.line = [sys.executable, "-m", "tutti.cli", *run, *places(text, out), *options]
        self.out, self.machines = out, []

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *error) -> None:
        for machine in self.machines:
            machine.kill()
            machine.wait()

    def memory(self, number: int) -> Path:
        return self.out.with_name(f"memory-{number}")

    def add(self) -> None:
        """Start a machine. The first one is where the others meet: it has to listen before they start."""
        number = len(self.machines)
        self.memory(number).mkdir()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TUTTI_PLANS": "off"}
        environment["TUTTI_MEMORY"] = str(self.memory(number))
        with open(self.out.with_name(f"machine-{number}.log"), "w") as log:
            machine = subprocess.Popen(self.line, stdout=log, stderr=subprocess.STDOUT, env=environment)
        self.machines.append(machine)
        if number == 0:
            self.wait_for(self.listens, "the first machine listens")

    def listens(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("localhost", self.port)) == 0

    def lose(self, number: int) -> None:
        """A machine, all at once, with its memory."""
        for process in (*ranks(self.machines[number]).values(), self.machines[number].pid):
            os.kill(process, signal.SIGKILL)
        shutil.rmtree(self.memory(number))

    def wait_for(self, true: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not true():
            assert time.monotonic() < end, f"{what}\n{self.said()}"
            time.sleep(0.1)

    def steps(self) -> int:
        return max(series(read(self.out), "loss")[0], default=0)

    def said(self) -> str:
        logs = sorted(self.out.parent.glob("machine-*.log"))
        return "\n".join(f"{log.name}: {log.read_text()}" for log in logs)
