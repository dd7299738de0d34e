"""Runs Python code that nobody has read, such as a model's, apart from the program that asks for it.

Each program runs in a process of its own (`isolated.py`) with `python -I`, an empty environment and an empty folder,
which is gone afterwards. On every POSIX system it has limits of CPU seconds, address space, file size, open files and
wall-clock time, its output is cut, and it and its process group are ended. On Linux, where user namespaces may be made
(`Outcome.isolated`), it has besides

- no network at all, also no loopback, and no sockets under /run,
- no other processes in sight, and `processes` of its own, which all end with it,
- all files read-only, except its folder, which lies in memory and has a limited size.

Root runs it as user 65534 without capabilities. Where Python lies in a folder that root alone may read, it keeps root's
files instead, still without capabilities, and is refused if there are no namespaces.

What is not isolated: it reads whatever files its user may read, shares the kernel, the clock and the load of the
machine, and up to `processes` times `memory_bytes` of memory. Without namespaces it has the network and its user's
rights to write, and may start no process or thread. Where that is not enough, run the whole job in a container or
virtual machine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

PROGRAM = Path(__file__).with_name("isolated.py")
KINDS = "passed", "failed", "timeout", "memory", "error"


@dataclass(frozen=True)
class Limits:
    """Resource limits of a program.

    seconds: wall-clock time in seconds. cpu_seconds: processor time of each of its processes, in whole seconds.
    memory_bytes: address space of each of them. processes: number of processes at once, threads included. file_bytes:
    size of one file. files_bytes: size of all files in its folder. output_bytes: how much of its output is kept.
    namespaces: whether to use those of Linux where they may be made.
    """

    seconds: float = 10.0
    cpu_seconds: int = 10
    memory_bytes: int = 512 * 2**20
    processes: int = 8
    file_bytes: int = 16 * 2**20
    files_bytes: int = 64 * 2**20
    output_bytes: int = 10_000
    namespaces: bool = True

    def __post_init__(self) -> None:
        for name, x in asdict(self).items():
            if name != "namespaces" and not x > 0:
                raise ValueError(f"{name} is {x}; it must be above 0")


@dataclass(frozen=True)
class Outcome:
    """Result of a program. kinds: outcome of each test, or of the program if there is none: "passed"; "failed", an
    assertion was wrong; "timeout", its time was over; "memory", it had too little; "error", anything else, such as
    another exception or an early exit. output: the beginning of what it printed. isolated: whether it ran in
    namespaces."""

    kinds: list[str]
    output: str
    isolated: bool

    @property
    def kind(self) -> str:
        """The first that is not "passed", if there is one."""
        return next((x for x in self.kinds if x != "passed"), "passed")


def run(code: str, tests: Sequence[str] = (), limits: Limits | None = None) -> Outcome:
    """Run code and then each test, in the names that the code has made. It returns within `seconds` and a few more.

    Raises RuntimeError where the sandbox itself does not work or protects too little, and on other systems than POSIX.
    """
    if os.name != "posix":
        raise RuntimeError("code of models runs apart on POSIX systems only: use Linux, or leave the reward out")
    limits = limits or Limits()
    request = json.dumps({"code": code, "tests": list(tests), "limits": asdict(limits)}).encode()
    with tempfile.TemporaryDirectory(prefix="tutti-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen([sys.executable, "-I", str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, env={}, cwd=folder, start_new_session=True)  # fmt: skip
        try:
            printed, errors = process.communicate(request, timeout=limits.seconds + 10)
        except subprocess.TimeoutExpired:
            printed, errors = b"", b""
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if not printed and process.returncode < 0:  # the code has ended what watches it
        return Outcome(["error"] * max(1, len(tests)), "", False)
    if not printed:
        why = errors.decode(errors="replace").strip()[-500:]
        raise RuntimeError(f"the sandbox does not work here ({why}): where code is to be trusted with less isolation, "
                           "give Limits(namespaces=False)")  # fmt: skip
    answer = json.loads(printed)
    return Outcome(answer["outcomes"], answer["output"], answer["isolated"])
