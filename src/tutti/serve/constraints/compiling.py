"""Compiling constraints for a service: each is tried in a child process first, within limits of time and memory.

There are two lanes, each a thread with a child. What the quick lane does not finish in its time goes to the patient
one, so that a request with a small schema never waits for one with a large schema.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from multiprocessing.connection import wait

from tutti.serve.constraints import trial
from tutti.serve.constraints.constrain import Constraint, Constraints, Key, key_of, text_of
from tutti.serve.values import Json, JsonValue, Tokenizer

QUICK, PATIENT = 0.1, 10.0  # seconds of processor time
# Bytes while a constraint is compiled, and of one that is compiled, which each sequence copies.
MEMORY, RETAINED = 512 << 20, 32 << 20
STEP = 0.02  # seconds of processor time that a token may take, for which all others wait
WAITING = 16  # constraints that may wait in the patient lane
PATIENCE = 60  # seconds of the wall clock for each second of processor time, on a busy machine
LOOK = 0.05  # seconds between looks whether somebody still waits


class Busy(Exception):
    """The lanes have no room for another constraint."""


class Abandoned(Exception):
    """Nobody waits for a constraint any more."""


class Trials:
    """A child process that tries constraints."""

    def __init__(self, constraints: Constraints):
        self.constraints = constraints
        self.process: subprocess.Popen[str] | None = None
        self.lock = threading.Lock()

    def start(self) -> subprocess.Popen[str]:
        """Start the process, unless it runs. Raises ValueError for a tokenizer that it cannot read."""
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                self.stop()
                constraints = self.constraints
                first = json.dumps(
                    {"tokenizer": _json_of(constraints.tokenizer), "size": constraints.size, "ends": constraints.ends}
                )
                self.process = subprocess.Popen([sys.executable, "-P", trial.__file__], stdin=subprocess.PIPE,
                                                stdout=subprocess.PIPE, text=True, start_new_session=True)  # fmt: skip
                self._write(first)
            return self.process

    def measure(self, kind: str, text: str, seconds: float, wanted: Callable[[], bool]) -> Json:
        """What a constraint takes: its `bytes` and the seconds of a `step`, or an `error`, or why it `ended` early.

        Raises Abandoned as soon as nobody waits for it, and ValueError if the process fails.
        """
        process = self.start()
        ask = {"kind": kind, "text": text, "seconds": seconds, "memory": MEMORY, "patience": PATIENCE * seconds}
        try:
            self._write(json.dumps(ask))
            assert process.stdout
            while not wait([process.stdout.fileno()], LOOK):  # unlike select, of any file descriptor
                if not wanted():
                    self._write(trial.CANCEL)
                    process.stdout.readline()
                    raise Abandoned
            return json.loads(process.stdout.readline())
        except (OSError, ValueError) as error:
            self.stop()
            raise ValueError(f"the process that tries constraints has ended: {error}") from error

    def _write(self, line: str) -> None:
        assert self.process and self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            with suppress(OSError):
                self.process.communicate()
            self.process = None


@dataclass(eq=False)
class Task:
    """A constraint that somebody waits for. wanted: whether somebody still does. done: called with the compiled
    constraint or an error, in the thread of a lane."""

    kind: str
    text: str
    key: Key
    wanted: Callable[[], bool]
    done: Callable[[Constraint | None, Exception | None], None]


class Lane:
    """A thread that tries constraints, and compiles those that are affordable.

    seconds: processor time of one. room: how many may wait. slower: the lane for those that take longer.
    """

    def __init__(self, constraints: Constraints, seconds: float, room: int, slower: Lane | None = None):
        self.constraints, self.seconds, self.room, self.slower = constraints, seconds, room, slower
        self.trials = Trials(constraints)
        self.tasks: deque[Task] = deque()
        self.changed, self.ended = threading.Condition(), False
        self.thread: threading.Thread | None = None

    def put(self, task: Task) -> None:
        """Try a constraint after those that wait. Raises Busy if too many do."""
        with self.changed:
            self.tasks = deque(x for x in self.tasks if x.wanted())
            if len(self.tasks) >= self.room:
                raise Busy(f"{self.room} constraints wait to be compiled")
            self.tasks.append(task)
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, name="tutti constraints", daemon=True)
                self.thread.start()
            self.changed.notify()

    def stop(self) -> None:
        """End the thread and its process. What waits is dropped."""
        with self.changed:
            self.ended, self.tasks = True, deque()
            self.changed.notify()
        if self.thread:
            self.thread.join()
        self.trials.stop()

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.tasks or self.ended)
                if self.ended:
                    return
                task = self.tasks.popleft()
            try:
                self._do(task)
            except Abandoned:
                pass
            except Exception as error:
                task.done(None, error)

    def _do(self, task: Task) -> None:
        def wanted() -> bool:
            return task.wanted() and not self.ended

        if not wanted():
            return
        if (constraint := self.constraints.cached(task.key)) is None:
            taken = self.trials.measure(task.kind, task.text, self.seconds, wanted)
            if taken.get("ended") in ("time", "stopped") and self.slower:
                return self.slower.put(task)
            if refusal := self._refusal(task.kind, taken):
                if taken.get("ended") != "stopped":
                    self.constraints.refuse(task.key, refusal)
                raise ValueError(refusal)
            constraint = self.constraints.compile(task.kind, task.text, task.key, taken["bytes"])
        task.done(constraint, None)

    def _refusal(self, kind: str, taken: Json) -> str:
        """Why a constraint is refused; an empty text if it is not."""
        if error := taken.get("error"):
            return error
        remedy = "make it smaller: fewer alternatives and repetitions, no references in allOf"
        if ended := taken.get("ended"):
            reasons = {"time": f"takes more than {self.seconds:g} s to compile",
                       "memory": f"takes more than {MEMORY >> 20} MiB to compile",
                       "stopped": "was not compiled in time, because the machine is busy"}  # fmt: skip
            return f"this {kind} {reasons.get(ended, 'cannot be compiled')}; {remedy}"
        if taken["bytes"] > RETAINED:
            return f"this {kind} takes {taken['bytes'] >> 20} MiB; at most {RETAINED >> 20} are allowed; {remedy}"
        if taken["step"] > STEP:
            return f"this {kind} takes {taken['step']:.3f} s for each token; at most {STEP} are allowed; {remedy}"
        return ""


class Compiler:
    """The lanes of a service."""

    def __init__(self, constraints: Constraints, room: int):
        self.constraints = constraints
        self.patient = Lane(constraints, PATIENT, WAITING)
        self.quick = Lane(constraints, QUICK, room, self.patient)

    def submit(self, kind: str, what: JsonValue, wanted: Callable[[], bool],
               done: Callable[[Constraint | None, Exception | None], None]) -> None:  # fmt: skip
        """Compile a constraint; `done` is called at once if it is known. Raises Busy, and ValueError for one that is
        too large."""
        text = text_of(kind, what)
        task = Task(kind, text, key_of(kind, text), wanted, done)
        if constraint := self.constraints.cached(task.key):
            done(constraint, None)
        else:
            self.quick.put(task)

    def warm_up(self) -> None:
        """Start the process of the quick lane, so that no request waits for it."""
        self.quick.trials.start()

    def stop(self) -> None:
        """End the lanes."""
        self.quick.stop()
        self.patient.stop()


def _json_of(tokenizer: Tokenizer) -> str:
    """The tokenizer as the `tokenizers` library writes it. Raises ValueError for others."""
    backend: Tokenizer = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(backend, "to_str"):
        raise ValueError("constrained decoding needs a fast tokenizer, of the tokenizers library")
    backend = copy(backend)
    backend.no_padding()
    backend.no_truncation()
    return backend.to_str()
