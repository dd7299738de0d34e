"""Level "auto": calls begin operator by operator, and go on compiled once that is ready and faster.

| phase | what runs | until |
|---|---|---|
| plain | O0 | calls have taken `PATIENCE` seconds |
| compiling | O0, while another process compiles (with fewer than `ROOM` cores: nothing) | that is done |
| timing | O2 and O0 in turn | `TIMED` calls of each are timed |
| decided | the faster one | the end |

Levels differ in how they round. So each change is recorded with the number of its first call, and a run that resumes
changes at the same ones.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tutti.analysis.passes import available
from tutti.compile.background import CompileJob, start
from tutti.exec.executor import Executor
from tutti.exec.runtimes.runtime import from_rank_0, true_everywhere
from tutti.launch.launch import cores, local_rank
from tutti.launch.progress import progress

AUTO, PLAIN, COMPILED = "auto", "O0", "O2"
PATIENCE = 30.0  # processor seconds that compiling takes: a run that is shorter would not get them back
ROOM = 4  # cores of a process, from which compiling beside the steps does not slow them more than it saves
TIMED = 3
LOOK = 4  # calls between two looks at what another process does: all ranks agree on it

Changes = Sequence[tuple[int, str]]  # the first call of a level, and the level
log = logging.getLogger("tutti")
_jobs: list[CompileJob] = []  # the last one of this process: only one runs at a time


def _busy() -> bool:
    return any(not job.done for job in _jobs)


def planned(level: str) -> str:
    """The level that a step is planned and simulated for."""
    return COMPILED if level == AUTO else level


class Gradual:
    """An executor whose level changes. make: an executor at a level; all ranks of a job make it together.

    changes: those of an earlier run that had decided; the levels are as they were there.
    """

    def __init__(self, make: Callable[[str], Executor], changes: Changes = ()):
        self.make, self.changes = make, [(int(call), level) for call, level in changes]
        self.earlier = list(self.changes)
        self.executors = {PLAIN: make(PLAIN)}
        self.phase, self.level = "plain", PLAIN
        self.spent, self.calls = 0.0, 0
        self.seconds: dict[str, list[float]] = {PLAIN: [], COMPILED: []}
        self.job: CompileJob | None = None

    def executor(self, call: int) -> Executor:
        """The executor of a call, by its number from 1."""
        for first, level in self.earlier:
            if first <= call:
                self.level, self.phase = level, "decided"
        return self._at(self.level)

    @contextmanager
    def timed(self, call: int) -> Iterator[None]:
        """Time the call within the block, and choose the level of the next one."""
        begin, level = time.perf_counter(), self.level
        yield
        seconds = time.perf_counter() - begin
        self.calls += 1
        self.spent += seconds
        if self.earlier or self.phase == "decided":
            return
        if self.phase in ("warming", "timing"):
            self._compare(call, level, seconds)
        elif self.calls % LOOK == 0:
            if self.phase == "plain" and from_rank_0(lambda: self.spent > PATIENCE and not _busy()):
                self._begin()
            elif self.phase == "compiling" and from_rank_0(lambda: self.job is None or self.job.done):
                self._compiled()

    def _at(self, level: str) -> Executor:
        if level not in self.executors:
            self.executors[level] = self.make(level)
        return self.executors[level]

    def _begin(self) -> None:
        """Start to compile in another process: one for each machine. With few cores, compile here and now."""
        if available(COMPILED) == PLAIN:
            self.phase = "decided"
            return
        if not true_everywhere(cores() >= ROOM):
            self._compiled()
            return
        self.phase = "compiling"
        functions = self._at(COMPILED).uncompiled(self.executors[PLAIN])
        if functions and local_rank() == 0:
            self.job = start(functions)
            _jobs[:] = [self.job]

    def _compiled(self) -> None:
        """Compile in this process, which finds the results of the other one, if there is one. All ranks go on
        compiled, or none."""
        if self.job is not None:
            if failed := self.job.failed:
                log.warning("level auto: compiling beside the first steps failed (%s); this process compiles", failed)
            self.job.stop()
        try:
            with progress("taking over what was compiled" if self.job else "compiling the steps"):
                self._at(COMPILED).compile_like(self.executors[PLAIN])
            error = ""
        except Exception as failure:  # of any compiler
            error = f"{type(failure).__name__}: {str(failure).strip().splitlines()[0] if str(failure) else ''}"
        if true_everywhere(not error):
            self.phase = "warming"
            return
        self.phase = "decided"
        log.warning("level auto: O0 to the end, because compilation failed%s", f" ({error})" if error else "")

    def _compare(self, call: int, level: str, seconds: float) -> None:
        """Take the levels in turn, and in the end the one whose fastest call took less time."""
        if self.phase == "warming":  # the first compiled call is not representative
            if level == COMPILED:
                self.phase = "timing"
            self._change(call + 1, PLAIN if level == COMPILED else COMPILED)
            return
        self.seconds[level].append(seconds)
        if len(self.seconds[COMPILED]) < TIMED:
            self._change(call + 1, PLAIN if level == COMPILED else COMPILED)
            return
        self.phase = "decided"
        plain, compiled = from_rank_0(lambda: (min(self.seconds[PLAIN]), min(self.seconds[COMPILED])))
        if compiled > plain:
            self._change(call + 1, PLAIN)
        log.info("level auto: %s from call %d on (%.3g s compiled, %.3g s operator by operator)", self.level,
                 self.changes[-1][0], compiled, plain)  # fmt: skip

    def _change(self, call: int, level: str) -> None:
        self.level = level
        self.changes.append((call, level))
