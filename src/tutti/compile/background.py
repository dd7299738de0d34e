"""Compile functions in another process, which leaves the results in torch's cache on disk.

    job = start(functions)
    ...                      # train on
    if job.done: ...         # compiling them here takes a fraction of the time now

The process runs `python -m tutti.compile.worker` at a low priority. It reads JSON from its standard input.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import torch

from tutti.compile.compiled import Arguments, Compiled, Described
from tutti.ir.portable import NotPortable, packed

# Where this process finds tutti. -P keeps the working directory, with whatever is in it, out of the path.
PATH = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]


class CompileJob:
    """Compilation in progress. failed: what the process said, if it could not compile."""

    def __init__(self, text: str):
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        with tempfile.TemporaryFile("w+") as work:  # a pipe would block until the process has imported torch
            work.write(text)
            work.seek(0)
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tutti.compile.worker"], stdin=work, stdout=subprocess.DEVNULL,
                stderr=self.errors, start_new_session=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(PATH)},
            )  # fmt: skip
        self.stop = weakref.finalize(self, _end, self.process, self.errors)  # at the latest when Python exits

    @property
    def done(self) -> bool:
        """True if the process has ended."""
        return self.process.poll() is not None

    @property
    def failed(self) -> str:
        """The last line that a process which failed wrote; empty for others."""
        if not self.process.poll():
            return ""
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines()
        return lines[-1] if lines else f"exit code {self.process.returncode}"


def _end(process: subprocess.Popen[bytes], errors: IO[str]) -> None:
    """End a process, if it has not ended."""
    if process.poll() is None:
        process.kill()
        process.wait()
    errors.close()


def start(functions: Sequence[tuple[Compiled, Arguments]]) -> CompileJob:
    """Begin to compile functions, each for arguments of some shapes, strides, dtypes and devices.

    Functions that JSON cannot express are left out: they are compiled where they are called.
    """
    rows = []
    for function, args in functions:
        graph, modules = function.rewritten(args)
        if modules:  # sub-graphs of loops
            continue
        try:
            rows.append({"nodes": packed(graph), "args": [_described(x) for x in args]})
        except NotPortable:
            continue
    return CompileJob(json.dumps({"threads": torch.get_num_threads(), "functions": rows}))


def _described(x: torch.Tensor | Described) -> list:
    return [list(x.shape), list(x.stride()), str(x.dtype).removeprefix("torch."), str(x.device)]
