"""Order the jobs of a Program so that collectives overlap with computation.

A device computes one job at a time. Each mesh axis carries one collective at a time, in the order of their starts.
List scheduling (R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969) picks, among the ready jobs, by one
of three rules (`RULES`), and the order with the smallest makespan wins, or one
of nearly the same makespan that needs less memory:

    critical_path    the job with the longest path to the end first
    slack            the job that the next collective waits for first; keeps the two copies of a batch out of step
    given            computations in the given order, so that recomputation stays where memory is scarce

Collectives start in order of their critical paths, as many as keep an axis busy until the next job ends.

A collective that reads only inputs, such as the gather of a parameter, does not start before there is memory for its
result. A computation whose result needs memory, but cannot be read before a later value is there, waits for that value.
If the peak would exceed that of the given order plus `headroom`, jobs that free memory go first, then the next
job of the given order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

HEADROOM = 0.1  # the peak may exceed that of the given order by this fraction, or by AHEAD bytes if that is more
AHEAD = 128 << 20  # bytes
SHARES = (1.0, 0.5, 0.0)  # fractions of the headroom to try, because the scheduler may exceed its bound
NEARLY = 1.01  # of orders that take at most this many times the smallest makespan, the one with the lowest peak wins
RULES = ("critical_path", "slack", "given")
SEEN = 300  # jobs of the given order to look ahead for their memory
LOOKED_AT = 16  # ready jobs to try for one that fits into memory

Keys = Sequence[tuple[float, ...]]  # by job
Entry = tuple[tuple[float, ...], int]


@dataclass(frozen=True)
class Job:
    """A computation or a collective.

    stream: "" for a computation, else the mesh axis of the collective. needs: indices of the jobs that must end
    before this one starts. makes, reads: indices of values.
    """

    stream: str
    seconds: float
    needs: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()


def makespan(jobs: Sequence[Job], order: Sequence[int]) -> float:
    """Seconds that the jobs take in an order. Each starts when the jobs it needs have ended and its stream is free."""
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


def peak(jobs: Sequence[Job], order: Sequence[int], sizes: Sequence[int], live_out: set[int]) -> int:
    """Return the peak bytes of live values."""
    return max(_course(jobs, order, sizes, live_out), default=0)


def overlapped(jobs: Sequence[Job], sizes: Sequence[int], live_out: set[int], room: float = 0.0,
               limit: float = inf) -> list[int]:  # fmt: skip
    """Find an order of the job indices with a small makespan, never larger than that of the given, valid order.

    sizes: bytes of each value. live_out: values that stay alive to the end. room: bytes that may be live, even if the
    given order needs less. limit: bytes that may be live, even if the given order needs more. Returns an empty list if
    every order exceeds the limit.
    """
    paths = critical_paths(jobs)
    keys = {
        "critical_path": [(-path,) for path in paths],
        "slack": [(left, -path) for left, path in zip(slacks(jobs), paths, strict=True)],
        "given": None,
    }
    original = list(range(len(jobs)))
    course = _course(jobs, original, sizes, live_out)
    needed = max(course, default=0)
    candidates = [(makespan(jobs, original), needed, original)] if needed <= limit else []
    for rule in RULES:
        for share in SHARES:
            bound = min(limit, max(room, needed + share * headroom(needed)))
            order = _Lister(jobs, sizes, live_out, keys[rule], keys["critical_path"], bound, course).run()
            needs = peak(jobs, order, sizes, live_out)
            if needs <= min(limit, max(room, needed + headroom(needed))):
                candidates.append((makespan(jobs, order), needs, order))
                break
    enough = NEARLY * min((seconds for seconds, _, _ in candidates), default=0.0)
    if needed <= limit:
        enough = min(enough, candidates[0][0])  # never slower than the given order
    fast = [(needs, seconds, order) for seconds, needs, order in candidates if seconds <= enough]
    return min(fast, default=(0, 0, []))[2]


def headroom(needed: int) -> float:
    """Bytes by which the peak may exceed that of the given order."""
    return max(HEADROOM * needed, AHEAD)


def critical_paths(jobs: Sequence[Job]) -> list[float]:
    """Seconds of the longest path from the start of each job to the end."""
    paths, behind = [job.seconds for job in jobs], [0.0] * len(jobs)
    for i in reversed(range(len(jobs))):
        paths[i] += behind[i]
        for j in jobs[i].needs:
            behind[j] = max(behind[j], paths[i])
    return paths


def slacks(jobs: Sequence[Job]) -> list[float]:
    """Seconds of computation from the start of each job to the first collective that depends on it, else inf."""
    target, left = [inf] * len(jobs), [0.0] * len(jobs)
    for i in reversed(range(len(jobs))):
        own = (i, 0.0) if jobs[i].stream else (target[i], left[i] + jobs[i].seconds)
        for j in jobs[i].needs:
            if own[0] < target[j]:
                target[j], left[j] = own
            elif own[0] == target[j]:
                left[j] = max(left[j], own[1])
    return [left[i] + jobs[i].seconds if target[i] < inf else inf for i in range(len(jobs))]


def _course(jobs: Sequence[Job], order: Sequence[int], sizes: Sequence[int], live_out: set[int]) -> list[int]:
    """Return the bytes of live values during each job of an order."""
    alive = _Alive(jobs, sizes, live_out)
    return [alive.take(i) for i in order]


class _Alive:
    """Bytes of live values: each lives from the job that makes it to the last job that reads it."""

    def __init__(self, jobs: Sequence[Job], sizes: Sequence[int], live_out: set[int]):
        self.jobs, self.sizes = jobs, sizes
        self.made_bytes = [sum([sizes[v] for v in job.makes]) for job in jobs]
        self.readers = [0] * len(sizes)
        for job in jobs:
            for v in job.reads:
                self.readers[v] += 1
        for v in live_out:
            self.readers[v] += 1
        self.now = 0

    def makes(self, i: int) -> int:
        return self.made_bytes[i]

    def frees(self, i: int) -> int:
        return sum(self.sizes[v] for v in self.jobs[i].reads if self.readers[v] == 1)

    def take(self, i: int) -> int:
        """Run job i and return the bytes that are live during it."""
        job, readers = self.jobs[i], self.readers
        self.now += self.made_bytes[i]
        highest = self.now
        for v in job.reads:
            readers[v] -= 1
            if not readers[v]:
                self.now -= self.sizes[v]
        for v in job.makes:
            if not readers[v]:
                self.now -= self.sizes[v]
        return highest


class _Lister:
    """The list scheduler. first, send: priorities of computations and of collectives, smallest first; without `first`,
    computations keep the given order. bound: bytes of live values beyond which it falls back to the next job of the
    given order. course: bytes of live values in the given order."""

    def __init__(self, jobs: Sequence[Job], sizes: Sequence[int], live_out: set[int], first: Keys | None, send: Keys,
                 bound: float, course: list[int]):  # fmt: skip
        self.jobs, self.send, self.strict = jobs, send, first is None
        self.first = [(i,) for i in range(len(jobs))] if first is None else first
        self.alive = _Alive(jobs, sizes, live_out)
        self.course, self.bound, self.headroom = course, bound, headroom(max(course, default=0))
        self.next = 0  # the first job of the given order that is not placed yet
        self.following = 0  # the first such computation
        self.behind: list[list[int]] = [[] for _ in jobs]
        for i, job in enumerate(jobs):
            for j in job.needs:
                self.behind[j].append(i)
        self.idle = set() if self.strict else self.of_inputs() | self.waiting(sizes, live_out)
        self.left = [sum(j not in self.idle for j in job.needs) for job in jobs]
        self.required = [i not in self.idle for i in range(len(jobs))]
        self.settled = [False] * len(jobs)
        self.over = [0.0] * len(jobs)
        self.free = {job.stream: 0.0 for job in jobs if job.stream}
        self.ready: list[Entry] = []  # computations that can start now
        self.soon: list[tuple[float, int]] = []  # computations that wait for a collective, by the time it ends
        self.ready_in_order: list[int] = []  # all of both, in the given order
        self.sends: dict[str, list[Entry]] = {stream: [] for stream in self.free}
        self.early: dict[str, list[Entry]] = {stream: [] for stream in self.free}  # they read inputs only
        self.ahead: dict[int, int] = {}  # bytes of results of early collectives that no job has read
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

    def of_inputs(self) -> set[int]:
        """Return the computations of inputs alone, or of gathered inputs."""
        jobs = self.jobs
        return {i for i, job in enumerate(jobs) if not job.stream and self.behind[i]
                and all(jobs[j].stream and not jobs[j].needs for j in job.needs)}  # fmt: skip

    def waiting(self, sizes: Sequence[int], live_out: set[int]) -> set[int]:
        """Return the computations to delay: they allocate more memory than they free, and each of their readers also
        needs a value that is available later. Recomputation of the forward pass is such work."""
        jobs, ends, delayed = self.jobs, [0.0] * len(self.jobs), set()
        for i, job in enumerate(jobs):
            ends[i] = job.seconds + max((ends[j] for j in job.needs), default=0.0)
        last = {v: i for i, job in enumerate(jobs) for v in job.reads if v not in live_out}
        for i, job in enumerate(jobs):
            if job.stream or not job.needs or not self.behind[i]:
                continue
            frees = sum(sizes[v] for v in job.reads if last.get(v) == i)
            if frees < sum(sizes[v] for v in job.makes) and all(
                any(ends[j] > ends[i] and j not in delayed for j in jobs[c].needs) for c in self.behind[i]
            ):
                delayed.add(i)
        return delayed

    def settle(self, i: int) -> None:
        """Require the jobs of inputs alone that job i needs. Called when all other jobs that it needs are placed."""
        if not self.required[i]:
            return
        idle = [j for j in self.jobs[i].needs if j in self.idle and not self.placed[j]]
        self.settled[i], self.left[i] = True, len(idle)
        for j in idle:
            if not self.required[j]:
                self.required[j] = True
                if not self.left[j]:
                    self.settle(j)
        if not idle:
            self.open(i)

    def open(self, i: int) -> None:
        """Make job i available. Called when all jobs that it needs are placed."""
        job = self.jobs[i]
        if job.stream:
            heap = self.sends if job.needs else self.early
            heappush(heap[job.stream], (self.send[i], i))
            return
        self.over[i] = max((self.over[j] for j in job.needs), default=0.0)
        heappush(self.soon, (self.over[i], i))
        heappush(self.ready_in_order, i)

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
        """Start the collectives whose axis is free before `until`."""
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
        """Return the next collective to start on an axis, or None."""
        heaps = [self.sends[stream]]
        if (early := self.early[stream]) and (force or self.room(early[0][1])):
            heaps.append(early)
        first = min((heap for heap in heaps if heap), key=lambda heap: heap[0], default=None)
        return heappop(first)[1] if first else None

    def room(self, i: int) -> bool:
        """Return whether there is memory to start a collective that reads only inputs."""
        if not self.ahead:
            return True
        early_bytes = sum(self.ahead.values()) + self.alive.makes(i)
        if early_bytes > self.headroom:
            return False
        until = min(self.behind[i], default=i)  # the given order starts it just before then
        return max(self.course[self.next : min(until, self.next + SEEN)], default=0) + early_bytes <= self.bound

    def choose(self) -> int | None:
        """Return the next computation to run, or None if none is ready."""
        if not self.ready:
            return None
        if self.strict:
            while self.placed[self.following] or self.jobs[self.following].stream:
                self.following += 1
            return heappop(self.ready)[1] if self.ready[0][1] == self.following else None
        looked: list[Entry] = []
        chosen = None
        while self.ready and len(looked) < LOOKED_AT and chosen is None:
            entry = heappop(self.ready)
            if self.placed[entry[1]]:
                continue
            if self.fits(entry[1]):
                chosen = entry[1]
            else:
                looked.append(entry)
        for entry in looked:
            heappush(self.ready, entry)
        if chosen is None and looked:
            while self.placed[self.ready_in_order[0]]:
                heappop(self.ready_in_order)
            chosen = heappop(self.ready_in_order)
        return chosen

    def fits(self, i: int) -> bool:
        return self.alive.now + self.alive.makes(i) <= self.bound
