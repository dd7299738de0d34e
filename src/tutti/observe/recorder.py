"""Record steps: the end times of the calls of each Program, as JSON lines, one file per rank.

    rank-3.jsonl     {"rank": 3, "ranks": 4, "host": ..., "groups": {"dp": [1, 3]}}
                     {"program": "train", "calls": [{"label": ..., "kind": "matmuls"}, ...]}
                     {"step": 120, "begin": 0, "end": 93, "runs": [["train", [0, 7, ...]]], "links": ...}
    simulated.json   the predicted times of the same Programs

Times are nanoseconds of a clock shared by all processes of a machine. On a CPU a mark costs two Python calls. On a GPU
it is an event of the stream, and a recorded step ends with a synchronization.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tutti.exec.kernels.codegen import Run, Stopwatch
from tutti.exec.kernels.levels import Prepared
from tutti.exec.runtimes.runtime import Distributed, Runtime
from tutti.hardware.machine import identity
from tutti.lower.program import Program
from tutti.observe.calls import calls_of, count
from tutti.observe.links import Links
from tutti.plan.layouts.layout import devices
from tutti.whole_files import write_text

STEPS = 50  # kept in the file


class Recorder:
    """Records every `every`-th step of one rank, and keeps at least the newest `STEPS`. folder: shared by all ranks."""

    def __init__(self, folder: Path, runtime: Runtime, device: torch.device, every: int = 1):
        if (virtual := len(runtime.ranks)) > 1:
            raise ValueError(f"{virtual} virtual devices take turns in one process, so their times mean nothing")
        folder.mkdir(parents=True, exist_ok=True)
        self.device, self.every, self.active = device, every, False
        self.path = folder / f"rank-{runtime.rank}.jsonl"
        self.watched: dict[int, tuple[str, Run, Tape]] = {}
        self.shapes: Counter[str] = Counter()
        self.waits: list[tuple[str, int]] = []
        self.waited = Tape(device)
        self.links, groups, message = None, {}, 0
        if isinstance(runtime, Distributed):
            self.links = Links(runtime.device)
            message = self.links.bytes
            groups = {axis: dist.get_process_group_ranks(group) for axis, group in runtime.groups.items()}
        about = {"rank": runtime.rank, "ranks": devices(runtime.mesh), "host": identity()}
        self.head = [json.dumps({**about, "groups": groups, "message": message})]
        self.steps: deque[str] = deque(maxlen=STEPS)
        self.written = 0  # number of steps in the file
        self.rewrite()

    def rewrite(self) -> None:
        self.written = len(self.steps)
        write_text(self.path, "".join(f"{line}\n" for line in (*self.head, *self.steps)))

    def append(self, line: str) -> None:
        with open(self.path, "a") as file:
            file.write(line + "\n")

    def watch(self, name: str, program: Program, ready: Prepared) -> Run:
        """A function that runs a Program and marks the times of its calls."""
        if id(ready) not in self.watched:
            calls, tape = calls_of(program), Tape(self.device)
            self.shapes[name] += 1
            name += f" {self.shapes[name]}" if self.shapes[name] > 1 else ""  # for another batch shape
            self.watched[id(ready)] = name, ready.timed(Stopwatch(tape.mark, calls)), tape
            described = [call.to_json() for call in calls.values()]
            self.head.append(json.dumps({"program": name, "nodes": count(program), "calls": described}))
            self.append(self.head[-1])
        return self.watched[id(ready)][1]

    @contextmanager
    def recording(self, number: int) -> Iterator[None]:
        """Record the step in the block, if it is its turn, and write it at the end."""
        if number % self.every:
            yield
            return
        zero, self.waits = _anchor(self.device), []
        for tape in (self.waited, *(tape for *_, tape in self.watched.values())):
            tape.marks.clear()
        begin, self.active = time.monotonic_ns(), True
        try:
            yield
        finally:
            self.active = False
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        end = time.monotonic_ns()
        runs = [[name, tape.times(zero)] for name, _, tape in self.watched.values() if tape.marks]
        times = self.waited.times(zero)
        waits = [[*what, *times[2 * i : 2 * i + 2]] for i, what in enumerate(self.waits)]
        links = self.links.measure() if self.links else {}
        line = {"step": number, "begin": begin, "end": end, "runs": runs, "waits": waits, "links": links}
        self.steps.append(json.dumps(line))
        self.append(self.steps[-1])
        self.written += 1
        if self.written >= 2 * STEPS:
            self.rewrite()

    @contextmanager
    def waiting(self, what: str, source: int) -> Iterator[None]:
        """Time a wait for what another rank of a pipeline sends."""
        self.waits.append((what, source))
        self.waited.mark()
        yield
        self.waited.mark()


class Tape:
    """The marks of one Program, over all its runs in a step."""

    def __init__(self, device: torch.device):
        self.marks: list[Any] = []
        self.mark: Callable[[], None] = self._queued if device.type == "cuda" else self._now

    def _now(self) -> None:
        self.marks.append(time.monotonic_ns())

    def _queued(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def times(self, zero: Anchor) -> list[int]:
        """The marks in nanoseconds."""
        if zero is None:
            return list(self.marks)
        event, at = zero
        return [at + round(1e6 * event.elapsed_time(mark)) for mark in self.marks]


Anchor = tuple[torch.cuda.Event, int] | None  # an event of a GPU's stream, and its time in ns


def _anchor(device: torch.device) -> Anchor:
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    event.synchronize()
    return event, time.monotonic_ns()
