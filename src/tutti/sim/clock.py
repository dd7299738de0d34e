"""The clock: ranks that compute, and collectives that synchronize their ranks and share links.

Each rank issues its tasks in order. It runs one computation at a time, and per mesh axis one collective at a time, in
order. A collective starts when all simulated ranks of its group have issued it and their earlier ones on that axis are
done. Its duration without contention is given; collectives of one rank that overlap on the same level of links share
its bandwidth equally. A synchronous collective blocks its ranks until it is done; an asynchronous one, where the
Program awaits it. Computation runs slower by a given share while collectives of its rank are in flight, of which the
ends are estimated as if no others shared their links. Transfers to and from the host, and computation on the host, run
on separate streams of each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from tutti.plan.layouts.layout import Mesh, axis_part, coordinates_of, group_of
from tutti.sim.tasks import COMPUTE, Task


@dataclass(frozen=True)
class Span:
    """A task on its stream, from begin to end, in seconds. number: index of the task."""

    rank: int
    number: int
    begin: float
    end: float


@dataclass(frozen=True)
class Stall:
    """A rank that is blocked until a collective ends, in seconds. number: index of that task."""

    rank: int
    number: int
    begin: float
    end: float


@dataclass
class _Rank:
    tasks: Sequence[Task]
    slower: float
    at: int = 0
    time: float = 0.0
    blocked: set[int] = field(default_factory=set)  # tasks it waits for
    done: set[int] = field(default_factory=set)
    carries: dict[str, float] = field(default_factory=dict)  # by stream: until when its collectives last, estimated


@dataclass
class _Collective:
    """members: rank -> index of its task."""

    stream: str
    levels: frozenset[int]
    left: float
    members: dict[int, int] = field(default_factory=dict)
    begin: float = 0.0


Group = tuple[int, ...]


class Clock:
    """tasks: by rank. slower: factor on a rank's computing time, 1 by default. yields: share of its speed that
    computation loses while collectives run."""

    def __init__(
        self,
        tasks: Mapping[int, Sequence[Task]],
        mesh: Mesh,
        slower: Mapping[int, float] | None = None,
        yields: float = 0.0,
    ):
        self.mesh, self.yields = mesh, yields
        self.ranks = {rank: _Rank(todo, (slower or {}).get(rank, 1.0)) for rank, todo in tasks.items()}
        self.spans: list[Span] = []
        self.stalls: list[Stall] = []
        self.arrivals: list[tuple[float, int]] = []  # a heap of (seconds, rank): when ranks reach a collective
        self.waiting: dict[tuple[str, Group], list[_Collective]] = {}  # in order; the first may run
        self.running: list[_Collective] = []
        self.groups: dict[tuple[int, str], Group] = {}

    def run(self) -> float:
        """Run to completion and return the seconds. Fills `spans` and `stalls`."""
        now = 0.0
        for rank in self.ranks:
            self.compute(rank)
        while self.arrivals or self.running:
            rates = [self.share(c) for c in self.running]
            over = min((now + c.left / rate for c, rate in zip(self.running, rates, strict=True)), default=inf)
            arrives = self.arrivals[0][0] if self.arrivals else inf
            then = max(now, min(over, arrives))
            for c, rate in zip(self.running, rates, strict=True):
                c.left -= (then - now) * rate
            now = then
            if arrives <= over:
                self.issue(heappop(self.arrivals)[1], now)
            else:
                self.finish(self.running[min(range(len(rates)), key=lambda i: self.running[i].left / rates[i])], now)
        stuck = [rank for rank, r in self.ranks.items() if r.at < len(r.tasks) or r.blocked]
        assert not stuck, f"ranks {stuck} wait for collectives that others of their group do not issue"
        return max((r.time for r in self.ranks.values()), default=0.0)

    def compute(self, rank: int) -> None:
        """Run a rank until it issues a collective, or has to wait for one."""
        r = self.ranks[rank]
        while r.at < len(r.tasks):
            task = r.tasks[r.at]
            r.blocked = {i for i in task.waits if i not in r.done}
            if r.blocked:
                return
            if task.stream != COMPUTE:
                heappush(self.arrivals, (r.time, rank))
                return
            end = r.time + self.lasts(r, task.seconds * r.slower)
            self.spans.append(Span(rank, r.at, r.time, end))
            r.time = end
            r.at += 1
        r.blocked = {i for i, task in enumerate(r.tasks) if task.stream != COMPUTE and i not in r.done}

    def lasts(self, r: _Rank, seconds: float) -> float:
        """The duration of a computation that begins now and would take so long without collectives."""
        beside = max(r.carries.values(), default=0.0) - r.time
        if beside <= 0 or not self.yields:
            return seconds
        return seconds + self.yields * min(beside, seconds / (1 - self.yields))

    def issue(self, rank: int, now: float) -> None:
        """A rank reaches a collective."""
        r = self.ranks[rank]
        task, number = r.tasks[r.at], r.at
        queue = self.waiting.setdefault((task.stream, self.group(rank, task.stream)), [])
        mine = next((c for c in queue if rank not in c.members), None)
        if mine is None:
            mine = _Collective(task.stream, task.levels, task.seconds)
            queue.append(mine)
        mine.members[rank] = number
        mine.left = max(mine.left, task.seconds)
        if self.axes(task.stream):
            r.carries[task.stream] = max(now, r.carries.get(task.stream, 0.0)) + task.seconds
        r.at += 1
        if task.blocks:
            r.blocked = {number}
        self.begin(queue, now)
        if not r.blocked:
            self.compute(rank)

    def begin(self, queue: list[_Collective], now: float) -> None:
        """Start the first collective of a stream if all of its group have reached it."""
        if queue and queue[0] not in self.running:
            first = queue[0]
            if set(first.members) == set(self.group(next(iter(first.members)), first.stream)):
                first.begin = now
                self.running.append(first)

    def finish(self, over: _Collective, now: float) -> None:
        self.running.remove(over)
        queue = self.waiting[over.stream, self.group(next(iter(over.members)), over.stream)]
        queue.remove(over)
        for rank, number in over.members.items():
            r = self.ranks[rank]
            r.done.add(number)
            self.spans.append(Span(rank, number, over.begin, now))
            if number in r.blocked:
                r.blocked.discard(number)
                if not r.blocked:
                    if now > r.time:
                        self.stalls.append(Stall(rank, number, r.time, now))
                        r.time = now
                    self.compute(rank)
        self.begin(queue, now)

    def share(self, c: _Collective) -> float:
        """The fraction of its links' bandwidth that a running collective gets."""
        beside = [other for other in self.running if set(other.members) & set(c.members)]
        return 1 / max((sum(level in o.levels for o in beside) for level in c.levels), default=1)

    def group(self, rank: int, stream: str) -> Group:
        """The simulated ranks of a collective's group."""
        key = rank, stream
        if key not in self.groups:
            self.groups[key] = tuple(r for r in self._members(rank, stream) if r in self.ranks)
        return self.groups[key]

    def axes(self, stream: str) -> list[str]:
        """The mesh axes of a stream's collectives, or none if the stream is private to a rank."""
        axes = stream.split()
        return axes if {axis_part(axis)[0] for axis in axes} <= set(self.mesh) else []

    def _members(self, rank: int, stream: str) -> Iterator[int]:
        axes = self.axes(stream)
        if not axes:
            yield rank
            return
        if len(axes) == 1:
            yield from group_of(rank, axes[0], self.mesh)
            return
        where = coordinates_of(rank, self.mesh)
        for other in sorted(self.ranks):
            there = coordinates_of(other, self.mesh)
            if all(there[a] == where[a] for a in self.mesh if a not in axes):
                yield other
