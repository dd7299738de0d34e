"""What takes seconds is told on a terminal, and nowhere else."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

from tutti.run.telling import telling, told_by

SCRIPT = """
import torch, tutti
model, batch = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()), (torch.randn(4, 4),)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = tutti.parallelize(model, optimizer, batch, loss=lambda m, b: m(*b).sum(), cluster="cpu:1", level="O1")
print("loss", step(batch).item())
"""


def test_a_terminal_is_told_what_is_done():
    ours, theirs = pty.openpty()
    job = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=theirs, text=True)
    os.close(theirs)
    said = b""
    while more := _read(ours):
        said += more
    out, _ = job.communicate()
    assert job.returncode == 0 and out.startswith("loss ")
    for what in ("capturing the step", "lowering the plan", "compiling: function 1 of"):
        assert what.encode() in said


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # the other side is closed
        return b""


def test_without_a_terminal_nothing_is_said():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("loss ") and done.stderr == ""


def test_who_has_a_display_is_told_instead():
    said: list[str] = []
    with told_by(said.append), telling("planning") as tell:
        tell("planning: dp 2")
        with telling("compiling"):
            pass
    assert said == ["planning", "planning: dp 2", "compiling"]
