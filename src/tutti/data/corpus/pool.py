"""Worker processes of one machine that do tasks, survive crashes and hangs, and tell progress."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Pipe, wait

from tutti.data.corpus.report import amount
from tutti.data.corpus.shard import Context
from tutti.data.corpus.tasks import Task, carry_out
from tutti.progress import Count, silent

ATTEMPTS = 6
START = 300.0  # seconds that a worker may take to begin: it imports torch


@dataclass(frozen=True)
class Failure:
    """A task that was not done, and why."""

    task: str
    why: str


def rate(documents: int, size: int, begin: float) -> str:
    """How fast documents are read since a time of `time.perf_counter`."""
    seconds = max(time.perf_counter() - begin, 1e-9)
    return f"{documents:,} documents, {amount(int(size / seconds))}/s" if documents else ""


class Here:
    """Does tasks in this process, one after the other: for tests and debuggers."""

    workers, first = 1, True

    def run(self, tasks: Sequence[Task], progress: Count = silent) -> list[Failure]:
        failures: list[Failure] = []
        context, begin = _Counting(), time.perf_counter()
        for done, task in enumerate(tasks):
            progress(done, len(tasks), rate(context.documents, context.size, begin))
            if task.done() is not None:
                continue
            try:
                carry_out(task, context)
            except Exception as error:
                failures.append(Failure(task.name, described(error)))
                if is_full(error):
                    break
        progress(len(tasks), len(tasks), rate(context.documents, context.size, begin))
        return failures

    def close(self) -> None: ...


class _Counting(Context):
    def __init__(self) -> None:
        self.documents = self.size = 0

    def tick(self, documents: int, size: int) -> None:
        self.documents += documents
        self.size += size


class Processes:
    """Does tasks in `workers` processes.

    A worker that dies (of memory, or of a fault in a library) or makes no progress for `stall` seconds costs its task
    only: the task starts again in a new process, document by document, so that a document that ends its process is
    found and left out. After ATTEMPTS the task has failed.
    """

    first = True

    def __init__(self, workers: int, stall: float = 900.0):
        if workers < 1:
            raise ValueError(f"workers is {workers}; give 1 or more, or 0 to work in this process")
        self.workers, self.stall = workers, stall
        self._processes: list[_Worker] = []

    def run(self, tasks: Sequence[Task], progress: Count = silent) -> list[Failure]:
        run, begin = _Run([task for task in tasks if task.done() is None]), time.perf_counter()
        while run.waiting or self._busy:
            self._give(run)
            self._hear(run)
            progress(run.done, len(run.tasks), rate(run.documents, run.size, begin))
        return run.failures

    def close(self) -> None:
        """End the workers."""
        for worker in self._processes:
            worker.end()
        self._processes.clear()

    @property
    def _busy(self) -> list[_Worker]:
        return [w for w in self._processes if w.task is not None]

    def _give(self, run: _Run) -> None:
        from tutti.data.corpus import native

        while run.waiting and len(self._busy) < self.workers:
            idle = next((w for w in self._processes if w.task is None), None)
            if idle is None:
                self._processes.append(idle := _Worker(native.library_path()))
            index = run.waiting.pop()
            run.attempts[index] += 1
            try:
                idle.give(index, run.tasks[index], run.attempts[index] > 1)
            except (BrokenPipeError, ConnectionResetError):  # it was ended while idle
                run.attempts[index] -= 1
                run.waiting.append(index)
                self._remove(idle)

    def _hear(self, run: _Run) -> None:
        busy = {w.connection: w for w in self._busy}
        for connection in wait(list(busy), timeout=0.5):
            worker = busy[connection]  # pyright: ignore[reportArgumentType]
            try:
                kind, value = worker.connection.recv()
            except (EOFError, ConnectionResetError):
                self._again(run, worker, _death(worker.process.wait()))
                continue
            worker.heard = time.monotonic()
            if kind == "ready":
                worker.ready = True
            elif kind == "tick":
                run.documents += value[0]
                run.size += value[1]
            elif kind == "done":
                run.done, worker.task = run.done + 1, None
            else:
                run.fail(worker, *value)
        for worker in self._busy:
            task = run.tasks[worker.task or 0]
            if task.ticks and time.monotonic() - worker.heard > (
                self.stall if worker.ready else max(self.stall, START)
            ):
                self._again(run, worker, f"it made no progress for {self.stall:.0f} s")

    def _again(self, run: _Run, worker: _Worker, why: str) -> None:
        index = worker.task
        assert index is not None
        self._remove(worker)
        notes = run.tasks[index].notes()
        if notes > run.notes[index]:  # a document was found that ends its process: so many cost no attempt
            run.notes[index], run.attempts[index] = notes, 1
        if run.attempts[index] < ATTEMPTS:
            run.waiting.append(index)
        else:
            run.failures.append(Failure(run.tasks[index].name, f"{why}, {ATTEMPTS} times"))

    def _remove(self, worker: _Worker) -> None:
        worker.end()
        self._processes.remove(worker)


class _Worker:
    """A process of `worker.py`, which imports no module of the caller: scripts without a main guard, notebooks and
    standard input are no trouble."""

    def __init__(self, library: str):
        self.connection, theirs = Pipe()
        command = [sys.executable, "-m", "tutti.data.corpus.worker", str(theirs.fileno()), library, str(os.getpid())]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self.task: int | None = None
        self.ready, self.heard = False, time.monotonic()

    def give(self, index: int, task: Task, careful: bool) -> None:
        self.task, self.heard = index, time.monotonic()
        self.connection.send((task, careful))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


class _Run:
    """What is known of the tasks of one call of Processes.run."""

    def __init__(self, tasks: Sequence[Task]):
        self.tasks = tasks
        self.waiting = list(range(len(tasks)))[::-1]
        self.attempts = [0] * len(tasks)
        self.notes = [0] * len(tasks)
        self.failures: list[Failure] = []
        self.done = self.documents = self.size = 0

    def fail(self, worker: _Worker, why: str, full: bool) -> None:
        assert worker.task is not None
        self.failures.append(Failure(self.tasks[worker.task].name, why))
        worker.task = None
        if full:
            self.waiting.clear()


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        hint = "; out of memory is the usual reason" if -code == signal.SIGKILL else ""
        return f"its process was ended by {signal.Signals(-code).name}{hint}"
    return f"its process ended with code {code}"


def described(error: BaseException) -> str:
    """An error in one line, with the line of code that raised it unless it is about a file."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.filename is not None:
        return text
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{text} ({frame.filename}:{frame.lineno})"


def is_full(error: BaseException) -> bool:
    """Whether a disk is full, so that no other task can write either."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
