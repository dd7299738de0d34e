"""The process that compiles in the background: `tutti.compile.worker`."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
import torch
from tutti.compile.worker import register_operators
register_operators()
for name in sys.argv[1:]:
    getattr(torch.ops.tutti, name)  # AttributeError if nothing defines it
"""


def _run(*operators: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", SCRIPT, *operators], capture_output=True, text=True, timeout=120)


def test_the_worker_has_the_operators_of_all_sub_packages():
    """A graph with an operator that it lacks is left out: it would be compiled where it is called, during a step."""
    run = _run("attention", "grouped_mm", "experts_rows", "ctc_loss", "linear_rows", "stored", "rms_norm")
    assert run.returncode == 0, run.stderr


def test_an_operator_that_nothing_defines_is_missing():
    with pytest.raises(subprocess.CalledProcessError):
        _run("no_such_operator").check_returncode()
