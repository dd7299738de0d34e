"""Overlap: an order of a Program's jobs in which links are busy while the device computes.

A device computes one job at a time, and each axis of the mesh carries one collective at a time, in the order in which
they are begun. List scheduling (R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969): of what could be
computed now the job is taken from which the longest way leads to the end, or, so that copies do not go in step, that
which is soonest followed by a collective; of these two orders the one that ends earlier (`RULES`). Collectives are
begun in the order of their ways, as many as keep an axis busy until the next job is done.

What waits only for inputs, as gathers of parameters do, is not begun before the memory for it is free. Where more would
be alive than the given order needs (and a little more), jobs that free memory come first, and else the next of the
given order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

SLACK = 0.1  # of the peak of the given order: by so much the peak may grow
AHEAD = 128 << 20  # bytes of results of collectives that wait for nothing, and that nobody has read yet
RULES = ("way", "hurry")
LOOKED_AT = 16  # jobs that are ready and looked at for one that fits into memory

Keys = Sequence[tuple[float, ...]]  # by job
Entry = tuple[tuple[float, ...], int]


@dataclass(frozen=True)
class Job:
    """stream: "" computes, all else is an axis. needs: numbers of jobs. makes, reads: numbers of values."""

    stream: str
    seconds: float
    needs: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()


def makespan(jobs: Sequence[Job], order: Sequence[int]) -> float:
    """Seconds that jobs take in an order: each begins when what it needs is over and its stream is free."""
    over: dict[int, float] = {}
    computed, free = 0.0, {job.stream: 0.0 for job in jobs}
    for i in order:
        job = jobs[i]
        begin = max([computed, *(over[j] for j in job.needs)])
        if job.stream:
            begin = max(begin, free[job.stream])
            over[i] = free[job.stream] = begin + job.seconds
        else:
            over[i] = computed = begin + job.seconds
    return max(over.values(), default=0.0)


def peak(jobs: Sequence[Job], order: Sequence[int], sizes: Sequence[int], kept: set[int]) -> int:
    """The most bytes of values that are alive at once."""
    alive = _Alive(jobs, sizes, kept)
    return max((alive.take(i) for i in order), default=0)


def overlapped(jobs: Sequence[Job], sizes: Sequence[int], kept: set[int]) -> list[int]:
    """The numbers of jobs, in an order that ends early. Given they are in an order in which they could run.

    sizes: bytes of values. kept: values that are alive until the end.
    """
    way, soon = ways(jobs), hurries(jobs)
    keys = {"way": [(-w,) for w in way], "hurry": [(s, -w) for s, w in zip(soon, way, strict=True)]}
    orders = [_Lister(jobs, sizes, kept, keys[rule], keys["way"]).run() for rule in RULES]
    return min(orders, key=lambda order: makespan(jobs, order))


def ways(jobs: Sequence[Job]) -> list[float]:
    """Seconds of the longest way from the begin of each job to the end."""
    way, behind = [job.seconds for job in jobs], [0.0] * len(jobs)
    for i in reversed(range(len(jobs))):
        way[i] += behind[i]
        for j in jobs[i].needs:
            behind[j] = max(behind[j], way[i])
    return way


def hurries(jobs: Sequence[Job]) -> list[float]:
    """Seconds to be computed from the begin of each job to the first collective, in the given order, that needs it."""
    target, left = [inf] * len(jobs), [0.0] * len(jobs)
    for i in reversed(range(len(jobs))):
        own = (i, 0.0) if jobs[i].stream else (target[i], left[i] + jobs[i].seconds)
        for j in jobs[i].needs:
            if own[0] < target[j]:
                target[j], left[j] = own
            elif own[0] == target[j]:
                left[j] = max(left[j], own[1])
    return [left[i] + jobs[i].seconds if target[i] < inf else inf for i in range(len(jobs))]


class _Alive:
    """Bytes of values between the job that makes them and the last that reads them."""

    def __init__(self, jobs: Sequence[Job], sizes: Sequence[int], kept: set[int]):
        self.jobs, self.sizes = jobs, sizes
        self.readers = [0] * len(sizes)
        for job in jobs:
            for v in job.reads:
                self.readers[v] += 1
        for v in kept:
            self.readers[v] += 1
        self.now = 0

    def makes(self, i: int) -> int:
        return sum(self.sizes[v] for v in self.jobs[i].makes)

    def frees(self, i: int) -> int:
        return sum(self.sizes[v] for v in self.jobs[i].reads if self.readers[v] == 1)

    def take(self, i: int) -> int:
        """Run a job; the bytes that are alive while it does."""
        self.now += self.makes(i)
        most = self.now
        for v in self.jobs[i].reads:
            self.readers[v] -= 1
            self.now -= self.sizes[v] if not self.readers[v] else 0
        self.now -= sum(self.sizes[v] for v in self.jobs[i].makes if not self.readers[v])
        return most


class _Lister:
    """first: of what can be computed the least is computed first. send: and of collectives."""

    def __init__(self, jobs: Sequence[Job], sizes: Sequence[int], kept: set[int], first: Keys, send: Keys):
        self.jobs, self.first, self.send = jobs, first, send
        self.alive = _Alive(jobs, sizes, kept)
        self.bound = (1 + SLACK) * peak(jobs, range(len(jobs)), sizes, kept)
        self.behind: list[list[int]] = [[] for _ in jobs]
        for i, job in enumerate(jobs):
            for j in job.needs:
                self.behind[j].append(i)
        self.left = [len(job.needs) for job in jobs]
        self.over = [0.0] * len(jobs)
        self.free = {job.stream: 0.0 for job in jobs if job.stream}
        self.ready: list[Entry] = []  # to compute now
        self.soon: list[tuple[float, int]] = []  # to compute when a collective is over, by that time
        self.sends: dict[str, list[Entry]] = {stream: [] for stream in self.free}
        self.ahead: dict[int, int] = {}  # collectives that nobody has read: bytes
        self.at, self.order, self.placed = 0.0, [], [False] * len(jobs)

    def run(self) -> list[int]:
        for i in range(len(self.jobs)):
            if not self.left[i]:
                self.open(i)
        while len(self.order) < len(self.jobs):
            while self.soon and self.soon[0][0] <= self.at:
                i = heappop(self.soon)[1]
                heappush(self.ready, (self.first[i], i))
            self.begin(self.at)
            i = self.choose()
            if i is not None:
                end = max(self.at, self.over[i]) + self.jobs[i].seconds
                self.begin(end)
                self.place(i, end)
                self.at = end
            elif self.soon:
                self.begin(self.soon[0][0])
                self.at = max(self.at, self.soon[0][0])
            else:
                self.begin(inf, force=True)
        return self.order

    def open(self, i: int) -> None:
        """All that a job needs has been placed."""
        job = self.jobs[i]
        if job.stream:
            heappush(self.sends[job.stream], (self.send[i], i))
            return
        self.over[i] = max((self.over[j] for j in job.needs), default=0.0)
        heappush(self.soon, (self.over[i], i))

    def place(self, i: int, end: float) -> None:
        self.order.append(i)
        self.placed[i] = True
        self.over[i] = end
        self.alive.take(i)
        for j in self.jobs[i].needs:
            self.ahead.pop(j, None)
        for j in self.behind[i]:
            self.left[j] -= 1
            if not self.left[j]:
                self.open(j)

    def begin(self, until: float, force: bool = False) -> None:
        """Begin collectives that find their axis free before then."""
        for stream, waiting in self.sends.items():
            put_off = []
            while waiting and (self.free[stream] < until or self.free[stream] <= self.at):
                entry = heappop(waiting)
                i = entry[1]
                if not force and not self.jobs[i].needs and not self.room(i):
                    put_off.append(entry)
                    continue
                begin = max([self.free[stream], self.at, *(self.over[j] for j in self.jobs[i].needs)])
                self.free[stream] = begin + self.jobs[i].seconds
                if not self.jobs[i].needs:
                    self.ahead[i] = self.alive.makes(i)
                self.place(i, self.free[stream])
                if force:
                    break
            for entry in put_off:
                heappush(waiting, entry)

    def room(self, i: int) -> bool:
        """Whether a collective that waits for nothing may be begun already."""
        if not self.ahead:
            return True
        size = self.alive.makes(i)
        return sum(self.ahead.values()) + size <= AHEAD and self.alive.now + size <= self.bound

    def choose(self) -> int | None:
        """What to compute next, of what is ready; None where nothing is."""
        if not self.ready:
            return None
        looked: list[Entry] = []
        found = None
        while self.ready and len(looked) < LOOKED_AT and found is None:
            entry = heappop(self.ready)
            if self.alive.now + self.alive.makes(entry[1]) <= self.bound:
                found = entry
            else:
                looked.append(entry)
        if found is None:
            found = min(looked, key=lambda e: (self.alive.makes(e[1]) - self.alive.frees(e[1]) > 0, e[1]))
            looked.remove(found)
        for entry in looked:
            heappush(self.ready, entry)
        return found[1]
