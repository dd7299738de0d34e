"""Jobs: an order of what a Program does in which links are busy while the device computes.

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

SLACK = 0.1  # of the peak of the given order: by so much, or by AHEAD, the peak may grow
SHARES = (1.0, 0.5, 0.0)  # of that, which the scheduler is told of: now and then it exceeds what it is told
AHEAD = 128 << 20  # bytes
RULES = ("way", "hurry")
SEEN = 300  # jobs of the given order that are looked at for the memory that they will need
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


def overlapped(jobs: Sequence[Job], sizes: Sequence[int], kept: set[int], room: float = 0.0,
               most: float = inf) -> list[int]:  # fmt: skip
    """The numbers of jobs, in an order that ends early; no later than the given one, in which they could run.

    sizes: bytes of values. kept: values that are alive until the end. room: bytes that may be alive, even where the
    given order needs less. most: bytes that may be alive, even where the given order needs more; none of the orders
    may be found to need so little, which then is empty.
    """
    way, soon = ways(jobs), hurries(jobs)
    keys = {"way": [(-w,) for w in way], "hurry": [(s, -w) for s, w in zip(soon, way, strict=True)]}
    orders = [list(range(len(jobs)))]
    needed = peak(jobs, orders[0], sizes, kept)
    for rule in RULES:
        for share in SHARES:
            bound = min(most, max(room, needed + share * slack(needed)))
            order = _Lister(jobs, sizes, kept, keys[rule], keys["way"], bound).run()
            if peak(jobs, order, sizes, kept) <= min(most, max(room, needed + slack(needed))):
                orders.append(order)
                break
    return min(orders[needed > most :], key=lambda order: makespan(jobs, order), default=[])


def slack(needed: int) -> float:
    """Bytes by which the peak may be more than what the given order needs."""
    return max(SLACK * needed, AHEAD)


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
    """first: of what can be computed the least is computed first. send: and of collectives. bound: bytes of values that
    are alive; where they are more, the next of the given order is taken."""

    def __init__(self, jobs: Sequence[Job], sizes: Sequence[int], kept: set[int], first: Keys, send: Keys,
                 bound: float):  # fmt: skip
        self.jobs, self.first, self.send = jobs, first, send
        self.alive = _Alive(jobs, sizes, kept)
        given = _Alive(jobs, sizes, kept)
        self.course = [given.take(i) for i in range(len(jobs))]  # bytes that are alive in the given order
        self.bound, self.slack = bound, slack(max(self.course, default=0))
        self.next = 0  # the first of the given order that has not been placed
        self.behind: list[list[int]] = [[] for _ in jobs]
        for i, job in enumerate(jobs):
            for j in job.needs:
                self.behind[j].append(i)
        self.idle = {i for i, job in enumerate(jobs) if not job.stream and self.behind[i]
                     and all(jobs[j].stream and not jobs[j].needs for j in job.needs)}  # fmt: skip
        self.left = [sum(j not in self.idle for j in job.needs) for job in jobs]
        self.wanted = [i not in self.idle for i in range(len(jobs))]
        self.settled = [False] * len(jobs)
        self.over = [0.0] * len(jobs)
        self.free = {job.stream: 0.0 for job in jobs if job.stream}
        self.ready: list[Entry] = []  # to compute now
        self.soon: list[tuple[float, int]] = []  # to compute when a collective is over, by that time
        self.given: list[int] = []  # all that can be computed, in the given order
        self.sends: dict[str, list[Entry]] = {stream: [] for stream in self.free}
        self.early: dict[str, list[Entry]] = {stream: [] for stream in self.free}  # those that wait for nothing
        self.ahead: dict[int, int] = {}  # collectives that nobody has read: bytes
        self.at, self.order, self.placed = 0.0, [], [False] * len(jobs)

    def run(self) -> list[int]:
        for i in range(len(self.jobs)):
            if not self.left[i]:
                self.settle(i)
        while len(self.order) < len(self.jobs):
            while self.soon and self.soon[0][0] <= self.at:
                i = heappop(self.soon)[1]
                if not self.placed[i]:
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

    def settle(self, i: int) -> None:
        """All that a job needs has been placed, but perhaps what is made of inputs alone: that is wanted now."""
        if not self.wanted[i]:
            return
        idle = [j for j in self.jobs[i].needs if j in self.idle and not self.placed[j]]
        self.settled[i], self.left[i] = True, len(idle)
        for j in idle:
            if not self.wanted[j]:
                self.wanted[j] = True
                if not self.left[j]:
                    self.open(j)
        if not idle:
            self.open(i)

    def open(self, i: int) -> None:
        """All that a job needs has been placed."""
        job = self.jobs[i]
        if job.stream:
            heap = self.sends if job.needs else self.early
            heappush(heap[job.stream], (self.send[i], i))
            return
        self.over[i] = max((self.over[j] for j in job.needs), default=0.0)
        heappush(self.soon, (self.over[i], i))
        heappush(self.given, i)

    def place(self, i: int, end: float) -> None:
        self.order.append(i)
        self.placed[i] = True
        self.over[i] = end
        self.alive.take(i)
        for j in self.jobs[i].needs:
            self.ahead.pop(j, None)
        for j in self.behind[i]:
            if i not in self.idle or self.settled[j]:
                self.left[j] -= 1
                if not self.left[j]:
                    self.settle(j)
        while self.next < len(self.jobs) and self.placed[self.next]:
            self.next += 1

    def begin(self, until: float, force: bool = False) -> None:
        """Begin collectives that find their axis free before then."""
        for stream in self.sends:
            while self.free[stream] < until or self.free[stream] <= self.at:
                i = self.sent(stream, force)
                if i is None:
                    break
                begin = max([self.free[stream], self.at, *(self.over[j] for j in self.jobs[i].needs)])
                self.free[stream] = begin + self.jobs[i].seconds
                if not self.jobs[i].needs:
                    self.ahead[i] = self.alive.makes(i)
                self.place(i, self.free[stream])
                if force:
                    return

    def sent(self, stream: str, force: bool) -> int | None:
        """The collective to be begun next on an axis; None where there is none."""
        heaps = [self.sends[stream]]
        if (early := self.early[stream]) and (force or self.room(early[0][1])):
            heaps.append(early)
        first = min((heap for heap in heaps if heap), key=lambda heap: heap[0], default=None)
        return heappop(first)[1] if first else None

    def room(self, i: int) -> bool:
        """Whether a collective that waits for nothing may be begun already."""
        if not self.ahead:
            return True
        held = sum(self.ahead.values()) + self.alive.makes(i)
        if held > self.slack:
            return False
        until = min(self.behind[i], default=i)  # in the given order it would be begun shortly before
        return max(self.course[self.next : min(until, self.next + SEEN)], default=0) + held <= self.bound

    def choose(self) -> int | None:
        """What to compute next, of what is ready; None where nothing is."""
        if not self.ready:
            return None
        looked: list[Entry] = []
        found = None
        while self.ready and len(looked) < LOOKED_AT and found is None:
            entry = heappop(self.ready)
            if self.placed[entry[1]]:
                continue
            if self.fits(entry[1]):
                found = entry[1]
            else:
                looked.append(entry)
        for entry in looked:
            heappush(self.ready, entry)
        if found is None and looked:
            while self.placed[self.given[0]]:
                heappop(self.given)
            found = heappop(self.given)
        return found

    def fits(self, i: int) -> bool:
        return self.alive.now + self.alive.makes(i) <= self.bound
