"""Position of the main thread in its work: the watchdog reports it for a rank that makes no progress.

The main thread writes it, at the cost of one or two assignments per collective. The watchdog's thread reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from tutti.plan.layouts.layout import group_of


class Meeting(NamedTuple):
    """A communication: its kind, its mesh axis, and a label (of an operator or a message).

    peer: the rank at the other end of a send or receive, else None.
    """

    kind: str
    axis: str
    label: str
    peer: int | None = None

    def __str__(self) -> str:
        return f"{self.kind} of {self.label}" + (f" over {self.axis}" if self.axis else "")


class Heartbeat:
    """The progress of this process.

    where: the step, or between which steps. meeting: the communication in progress. work: the long operation in
    progress. moves: a counter that changes with every sign of progress.
    """

    def __init__(self) -> None:
        self.where = "at its beginning"
        self.meeting: Meeting | None = None
        self.work, self.compiling = "", False
        self.moves = 0
        self.rank, self.mesh = 0, {}

    def place(self, rank: int, mesh: Mapping[str, int]) -> None:
        """Set this rank's place on the mesh whose axes communications name."""
        self.rank, self.mesh = rank, dict(mesh)

    def go(self, where: str) -> None:
        self.where = where
        self.moves += 1

    def enter(self, meeting: Meeting | None) -> None:
        self.meeting = meeting
        self.moves += 1

    def leave(self) -> None:
        self.meeting = None
        self.moves += 1

    @contextmanager
    def within(self, kind: str, label: str) -> Iterator[None]:
        """Mark a communication of all ranks."""
        self.enter(Meeting(kind, "", label))
        try:
            yield
        finally:
            self.leave()

    @contextmanager
    def working(self, work: str) -> Iterator[None]:
        """Mark a long operation that shows no progress."""
        before, self.work = self.work, work
        self.moves += 1
        try:
            yield
        finally:
            self.work = before
            self.moves += 1

    def compiles(self, compiling: bool) -> None:
        """Mark the start and end of a compilation."""
        self.compiling = compiling
        self.moves += 1

    @property
    def busy(self) -> str:
        """The long operation in progress, or ""."""
        return "compiles" if self.compiling else self.work

    def peers(self) -> list[int] | None:
        """The ranks of its communication, itself included, or None for all."""
        meeting = self.meeting
        if meeting is None or meeting.peer is not None:
            return meeting and [self.rank, meeting.peer or 0]
        axes = [axis for axis in meeting.axis.split() if axis in self.mesh]
        return sorted({r for axis in axes for r in group_of(self.rank, axis, self.mesh)}) if axes else None


HEARTBEAT = Heartbeat()
