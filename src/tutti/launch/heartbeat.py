"""Where this process is in its work: what a watchdog tells of a rank that makes no progress.

Written by the main thread, at the price of an assignment or two for each collective; read by the watchdog's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from tutti.plan.layout import group_of


class Meeting(NamedTuple):
    """A communication: of what kind, over which axis, of what (the label of an operator, the name of a message).

    peer: the rank at the other end, where there is but one.
    """

    kind: str
    axis: str
    label: str
    peer: int | None = None

    def __str__(self) -> str:
        return f"{self.kind} of {self.label}" + (f" over {self.axis}" if self.axis else "")


class Heartbeat:
    """where: the step, or what is between two. meeting: the communication that it is in. work: what it does that is
    known to take long. moves: changes whenever it gets on."""

    def __init__(self) -> None:
        self.where = "at its beginning"
        self.meeting: Meeting | None = None
        self.work, self.compiling = "", False
        self.moves = 0
        self.rank, self.mesh = 0, {}

    def place(self, rank: int, mesh: Mapping[str, int]) -> None:
        """Take a place on a mesh, whose axes communications are over."""
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
        """In a communication of all ranks."""
        self.enter(Meeting(kind, "", label))
        try:
            yield
        finally:
            self.leave()

    @contextmanager
    def working(self, work: str) -> Iterator[None]:
        """At something that takes long, and at which nothing is seen of its progress."""
        before, self.work = self.work, work
        self.moves += 1
        try:
            yield
        finally:
            self.work = before
            self.moves += 1

    def compiles(self, compiling: bool) -> None:
        """Whether a function is being compiled."""
        self.compiling = compiling
        self.moves += 1

    @property
    def busy(self) -> str:
        """What it does that takes long; empty: nothing of the kind."""
        return "compiles" if self.compiling else self.work

    def peers(self) -> list[int] | None:
        """The ranks that its communication takes, itself among them; None: all."""
        meeting = self.meeting
        if meeting is None or meeting.peer is not None:
            return meeting and [self.rank, meeting.peer or 0]
        axes = [axis for axis in meeting.axis.split() if axis in self.mesh]
        return sorted({r for axis in axes for r in group_of(self.rank, axis, self.mesh)}) if axes else None


HEARTBEAT = Heartbeat()
