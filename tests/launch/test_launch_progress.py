"""What takes seconds is told on a terminal, and nowhere else."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from tutti.launch.progress import progress, told_by

SCRIPT = """
import torch, tutti
class Model(torch.nn.Sequential):
    def forward(self, x):
        print("forward")
        return super().forward(x)
torch.manual_seed(0)
model, batch = Model(torch.nn.Linear(4, 4), torch.nn.GELU()), (torch.randn(4, 4),)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = tutti.parallelize(model, optimizer, batch, loss=lambda m, b: m(*b).sum(), level="O1")
print("loss", step(batch).item())
"""


TOLD = "capturing the step", "lowering the plan", "compiling: function 1 of"


def run(*command: str) -> tuple[str, str]:
    """What is written to stdout, and what a terminal is told."""
    ours, theirs = pty.openpty()
    job = subprocess.Popen([*command], stdout=subprocess.PIPE, stderr=theirs, text=True)
    os.close(theirs)
    said = b""
    while more := _read(ours):
        said += more
    out, _ = job.communicate()
    assert job.returncode == 0, said
    return out, said.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # the other side is closed
        return b""


@pytest.mark.slow
@pytest.mark.starts
def test_a_terminal_is_told_what_is_done():
    out, said = run(sys.executable, "-c", SCRIPT)
    assert out.startswith("forward\nloss ")
    assert all(what in said for what in TOLD)


@pytest.mark.slow
def test_of_several_ranks_the_first_tells(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.replace('"O1"', '"O0"'))
    out, said = run(sys.executable, "-m", "tutti.cli", "run", "-n", "2", str(tmp_path / "script.py"))
    assert out.count("forward") == 2 == out.count("loss")
    hidden = "\x1b[?25l"  # the cursor, while there is a spinner
    assert said.count(hidden) == 2 and "capturing the step" in said and "lowering the plan" in said


@pytest.mark.starts
@pytest.mark.slow
def test_without_a_terminal_nothing_is_said():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    said = [
        line for line in done.stderr.splitlines() if "cpp_extension.py" not in line
    ]  # torch's, with nvcc and no GPU
    assert done.stdout.startswith("forward\nloss ") and said == []


def test_who_has_a_display_is_told_instead():
    said: list[str] = []
    with told_by(said.append), progress("planning") as tell:
        tell("planning: dp 2")
        with pytest.raises(ValueError, match="no"), progress("compiling"):
            raise ValueError("no")
    assert said == ["planning", "planning: dp 2", "compiling", "planning: dp 2", ""]
