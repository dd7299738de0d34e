"""What takes seconds is told on a terminal, and nowhere else."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import time

import pytest
from rich.console import Console

from tutti.launch import progress as display
from tutti.launch.progress import clock, live, narrated, progress, told_by

SCRIPT = """
import time, torch, tutti
from tutti.exec import executables
plain = executables.Executor
executables.Executor = lambda *args: (time.sleep(0.5), plain(*args))[1]  # a display shows what takes longer than 0.1 s
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


STAGES = "capturing the step", "lowering the plan", "compiling functions"


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
    assert all(what in said for what in STAGES)


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


def test_counts_are_told_and_come_back_after_what_is_nested():
    said: list[str] = []
    with told_by(said.append), progress("solving") as tell:
        tell.count(1, 2000, "3 a second")
        with progress("compiling"):
            pass
        tell.count(2000, 2000)
        tell("drawing")
    assert said == ["solving", "solving: 1 of 2,000, 3 a second", "compiling", "solving: 1 of 2,000, 3 a second",
                    "solving: 2,000 of 2,000", "drawing", ""]  # fmt: skip


def test_what_is_left_follows_the_pace_since_the_first_count(monkeypatch):
    now = 100.0
    monkeypatch.setattr(display.time, "monotonic", lambda: now)
    with told_by(lambda text: None), progress("packing") as tell:
        assert tell.work.left == ""
        tell.count(40, 100)  # done by an earlier run
        assert tell.work.left == ""
        now = 110.0
        tell.count(50, 100)
        assert tell.work.left == ", about 0:50 left"
        tell.count(0, 100)
        now = 120.0
        tell.count(50, 100)
        assert tell.work.left == ", about 0:10 left", "another phase counts anew"


def test_times_are_written_as_on_a_clock():
    assert [clock(s) for s in (0, 7.4, 192, 3723)] == ["0:00", "0:07", "3:12", "1:02:03"]


def test_lines_without_a_terminal_are_seldom_and_begin_each_count(monkeypatch):
    now, file = 0.0, io.StringIO()
    monkeypatch.setattr(display.time, "monotonic", lambda: now)
    with narrated(Console(file=file), "compressing", 10.0) as tell:
        for now in range(31):
            tell.count(now, 100, f"block {now}")
        tell.result("[all] is done")
    assert file.getvalue().splitlines() == [
        "  0.0 s  compressing: 0 of 100, block 0", " 11.0 s  compressing: 11 of 100, block 11, about 1:29 left",
        " 22.0 s  compressing: 22 of 100, block 22, about 1:18 left", " 30.0 s  [all] is done",
    ]  # fmt: skip


def test_a_silence_without_a_terminal_is_broken(monkeypatch):
    for name in ("EVERY", "SILENT"):
        monkeypatch.setattr(display, name, 0.01)
    file = io.StringIO()
    with narrated(Console(file=file), "reading the model"), progress("capturing the step"):
        deadline = time.monotonic() + 30
        while file.getvalue().count("capturing the step") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert file.getvalue().count("capturing the step") >= 2


def test_a_quiet_console_shows_nothing():
    file = io.StringIO()
    with narrated(Console(file=file, quiet=True, force_terminal=True), "reading", 0.0) as tell:
        tell.count(1, 2)
        tell.result("read")
    assert file.getvalue() == ""


def test_a_terminal_shows_counts_and_keeps_results():
    file = io.StringIO()
    with narrated(Console(file=file, force_terminal=True, width=120, highlight=False), "reading [all]") as tell:
        tell.count(1, 2, "a.txt")
        tell.result("found")
    assert "reading [all], a.txt" in file.getvalue() and "1 of 2" in file.getvalue() and " s  found" in file.getvalue()


def test_what_is_measured_is_not_disturbed_by_drawing():
    file = io.StringIO()
    with live(Console(file=file, force_terminal=True, width=120), True, drawn=False) as show:
        show(display.Work("products", 1, 2))
        drawn = file.getvalue()
        time.sleep(0.3)
        assert file.getvalue() == drawn and "1 of 2" in drawn
