"""Recording steps: when each call of each Program was over, a JSON line a step and a file for every rank.

    rank-3.jsonl     {"rank": 3, "ranks": 4, "host": ..., "groups": {"dp": [1, 3]}}
                     {"program": "train", "calls": [{"label": ..., "kind": "matmuls"}, ...]}
                     {"step": 120, "begin": 0, "end": 93, "runs": [["train", [0, 7, ...]]], "links": ...}
    simulated.json   what the calls of the same Programs were predicted to take

Times are nanoseconds of a clock that all processes of a machine share. On a CPU a mark costs two calls of Python; on a
GPU it is an event of the stream, and a recorded step ends with the queue empty.
"""

from __future__ import annotations

import json
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tutti.lower.program import Program
from tutti.plan.layout import devices
from tutti.run.code import Run, Stopwatch
from tutti.run.levels import Prepared
from tutti.run.monitoring.calls import calls_of, count
from tutti.run.monitoring.links import Links
from tutti.run.runtime import Distributed, Runtime

KEPT = 50  # steps


class Recorder:
    """Records every `every`-th step of one rank, and keeps the newest `KEPT`. folder: for the files of all ranks."""

    def __init__(self, folder: Path, runtime: Runtime, device: torch.device, every: int = 1):
        folder.mkdir(parents=True, exist_ok=True)
        self.device, self.every, self.active = device, every, False
        self.path = folder / f"rank-{runtime.rank}.jsonl"
        self.watched: dict[int, tuple[str, Run, Tape]] = {}
        self.step: dict[str, Any] = {}
        self.links, groups, message = None, {}, 0
        if isinstance(runtime, Distributed):
            self.links = Links(runtime.device)
            message = self.links.bytes
            groups = {axis: dist.get_process_group_ranks(group) for axis, group in runtime.groups.items()}
        about = {"rank": runtime.rank, "ranks": devices(runtime.mesh), "host": socket.gethostname()}
        self.head = [json.dumps({**about, "groups": groups, "message": message})]
        self.steps: deque[str] = deque(maxlen=KEPT)
        self.write()

    def write(self) -> None:
        whole = self.path.with_suffix(".part")
        whole.write_text("\n".join([*self.head, *self.steps]) + "\n")
        whole.replace(self.path)

    def watch(self, name: str, program: Program, ready: Prepared) -> Run:
        """What runs a Program, and marks the times of its calls."""
        if id(ready) not in self.watched:
            calls, tape = calls_of(program), Tape(self.device)
            names = [watched for watched, *_ in self.watched.values()]
            name += f" {names.count(name) + 1}" if name in names else ""  # of another batch shape
            self.watched[id(ready)] = name, ready.timed(Stopwatch(tape.mark, calls)), tape
            told = [call.to_json() for call in calls.values()]
            self.head.append(json.dumps({"program": name, "nodes": count(program), "calls": told}))
        return self.watched[id(ready)][1]

    @contextmanager
    def recording(self, number: int) -> Iterator[None]:
        """A step, which is written down when it is over, if its turn has come."""
        if number % self.every:
            yield
            return
        zero = _anchor(self.device)
        self.step = {"step": number, "begin": time.monotonic_ns(), "waits": []}
        for _, _, tape in self.watched.values():
            tape.marks.clear()
        self.active = True
        yield
        self.active = False
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.step["end"] = time.monotonic_ns()
        self.step["runs"] = [[name, tape.times(zero)] for name, _, tape in self.watched.values() if tape.marks]
        if self.links:
            self.step["links"] = self.links.measure()
        self.steps.append(json.dumps(self.step))
        self.write()

    @contextmanager
    def waiting(self, what: str, source: int) -> Iterator[None]:
        """What comes from another rank of a pipeline."""
        begin = time.monotonic_ns()
        yield
        self.step["waits"].append([what, source, begin, time.monotonic_ns()])


class Tape:
    """The marks of one Program, of all its runs in a step."""

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
        """In nanoseconds."""
        if zero is None:
            return list(self.marks)
        event, at = zero
        return [at + round(1e6 * event.elapsed_time(mark)) for mark in self.marks]


Anchor = tuple[torch.cuda.Event, int] | None  # an event of a GPU's stream, and when it was


def _anchor(device: torch.device) -> Anchor:
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    event.synchronize()
    return event, time.monotonic_ns()
