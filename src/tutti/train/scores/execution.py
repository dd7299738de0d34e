"""pass@k of generated code, which is executed in a process of its own with limits."""

from __future__ import annotations

import json
import math
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

MIB = 1 << 20

# The child reads code and tests. Then it refuses what Python has audit events for: files, sockets, processes. Only then
# it runs the code. Each test is (arguments, result). The last line proves that all tests were reached.
CHILD = """
import json, sys
given = json.load(sys.stdin)
sys.stdin.close()
REFUSED = ("open", "socket.", "subprocess.", "os.", "shutil.", "ctypes.", "mmap.", "pty.", "signal.", "ftplib.",
           "http.", "urllib.", "smtplib.", "webbrowser.", "tempfile.", "sqlite3.", "winreg.", "syslog.", "gc.")
def guard(event, args):
    if event.startswith(REFUSED):
        raise PermissionError(event)
code = compile(given["code"], "<generated>", "exec")
sys.addaudithook(guard)
scope = {"__name__": "generated"}
exec(code, scope)
for arguments, wanted in given["tests"]:
    made = scope[given["name"]](*arguments)
    if type(made) is not type(wanted) or made != wanted:
        raise AssertionError(f"{given['name']}{tuple(arguments)} is {made!r}, not {wanted!r}")
print(given["proof"])
"""


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The probability that one of k samples is correct, estimated without bias from more samples of one problem:

        1 - C(samples - correct, k) / C(samples, k)     (Chen et al. 2021, arXiv:2107.03374, equation 1)

    Raises ValueError if there are fewer samples than k, or than are correct.
    """
    if not 1 <= k <= samples or not 0 <= correct <= samples:
        raise ValueError(f"pass@{k} needs {k} or more samples; there are {samples}, of which {correct} are correct")
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def passes(
    code: str, name: str, tests: Sequence[tuple[Sequence[object], object]], seconds: float = 2.0, memory: int = 512
) -> str:
    """Run code in a process of its own and call its function `name`. Returns "" if all tests pass, else what failed.

    tests: (arguments, result) each, of JSON's types. A result must have the wanted type, too.
    seconds: limit of wall-clock time and, rounded up, of processor time. memory: address space in MiB.

    The process has no environment, no site packages, an empty working folder, and limits of time, memory, open
    files and file size (0: nothing can be written). Python's audit events for opening files, sockets, processes and
    changes of the file system raise PermissionError.

    These limits stop accidents, such as what a language model writes without intent. They are no protection against
    code that attacks: Python's audit hooks can be circumvented, and a process of the same user may do what the user
    may. Use a container or a virtual machine for code that you do not trust.
    """
    proof = secrets.token_hex(16)
    request = json.dumps({"code": code, "name": name, "tests": [[list(a), b] for a, b in tests], "proof": proof})

    def limit() -> None:
        processor = math.ceil(seconds)  # SIGXCPU says which limit it was; SIGKILL, a second later, cannot be ignored
        resource.setrlimit(resource.RLIMIT_CPU, (processor, processor + 1))
        for what, most in (
            (resource.RLIMIT_AS, memory * MIB), (resource.RLIMIT_FSIZE, 0),
            (resource.RLIMIT_NOFILE, 16), (resource.RLIMIT_CORE, 0),
        ):  # fmt: skip
            resource.setrlimit(what, (most, most))

    with tempfile.TemporaryDirectory() as empty:
        try:
            child = subprocess.run(
                [sys.executable, "-I", "-S", "-B", "-c", CHILD], input=request, capture_output=True, text=True,
                cwd=empty, env={}, timeout=seconds, preexec_fn=limit, start_new_session=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"it took longer than {seconds:g} s"
        except UnicodeDecodeError:
            return "it printed bytes that are no text"
    if child.returncode == -signal.SIGXCPU:
        return f"it took longer than {seconds:g} s"
    if child.returncode == 0 and child.stdout.splitlines()[-1:] == [proof]:
        return ""
    return (child.stderr.strip().splitlines() or [f"it ended with exit code {child.returncode}"])[-1]
