"""How fast an algorithm runs under each placement, from the costs of its fragments. Pure: nothing is measured here.

An iteration is `n_steps` in all `n_envs` environments and what is learned from them. With r ranks in p processes, with
the act A, the learning L and the share S of one of r learners in it, in seconds over a number of environments, it takes

    fused         A(n) + L(n)
    learners      all at once(A(n/r) + S(n/r)) + means x mean(weights)
    actors        all at once(A(n/r)) + L(n) + (p - 1) (message(chunk) + message(policy))
    async         the largest of: r L(n/r), an actor's A(n/r) and messages, the work of process 0, of the machine
    environments  H(n) + all at once(E(n/r)) + n_steps x r x pipe + L(n)
    server        all at once(A(n/r) + L(n/r)) + (r - r/p) x 2 message(weights) + r push

where H is choosing actions step by step and E stepping environments in a worker. *All at once* is where ranks contend:
the threads of a process for the interpreter (`Costs.serial` of a second of work excludes all others), and processes for
the cores (`Machine.stretch`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tutti.rl.placement.job import RunPlacement
from tutti.rl.placement.placement import PLACEMENTS, SPLIT

HOSTED = "an environment of the host"
THREADS = 2  # ranks in one process, at most: more have never been faster
OLDER, WORTH = ("async", "server"), 1.1  # required speedup of placements with stale policies or weights
NEAR = 1.03  # forecasts within 3 % count as equal; the simplest placement is chosen


@dataclass(frozen=True)
class Line:
    """Seconds, or bytes, over a number of environments: fixed + each x n."""

    fixed: float
    each: float = 0.0

    def __call__(self, n: float) -> float:
        return self.fixed + self.each * n

    @staticmethod
    def through(few: int, at_few: float, many: int, at_many: float) -> Line:
        """Through two measurements. Noise does not make it fall, or begin below 0."""
        if few == many:
            return Line(0.0, at_many / many)
        each = min(max((at_many - at_few) / (many - few), 0.0), at_many / many)
        return Line(at_many - each * many, each)


@dataclass(frozen=True)
class Costs:
    """Costs of an algorithm's fragments on one core, in seconds per iteration, and bytes of its messages.

    act, learn, share, host, step: A, L, S, H and E above. chunk: bytes. policy, weights: bytes of a policy, and of the
    gradients that learners average, `means` times. push: seconds in which a server adds a change. serial: the share of
    a rollout that excludes other threads. spread: cores that acting occupies where it has them. batch: size of the
    batch that learners share, or 0. limits: most ranks of placements whose chunks have too few rows for a batch with
    more. refused: placements that are not possible, and why.
    """

    n_envs: int
    n_steps: int
    act: Line
    learn: Line
    share: Line
    host: Line
    step: Line
    chunk: Line
    policy: float
    weights: float
    means: int
    push: float
    serial: float
    spread: float
    level: str
    batch: int = 0
    limits: dict[str, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def pure(self) -> bool:
        """Whether rollouts are programs, and not of environments of the host."""
        return HOSTED not in self.refused.get("async", "")

    def to_table(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(table: dict[str, Any]) -> Costs:
        lines: dict[str, Any] = {k: Line(**x) for k, x in table.items() if isinstance(x, dict) and "each" in x}
        return Costs(**{**table, **lines})


@dataclass(frozen=True)
class Machine:
    """The machine that ranks run on.

    cores: number of cores for ranks. most: maximum number of ranks. message: seconds of a message over its bytes,
    between two processes. mean: seconds of a mean over its bytes, by number of processes. meet: the same between the
    threads of a process, by their number. pipe: seconds to send a worker process its actions. stretch: slowdown of
    equal work by the number of processes that run at once. name, notes: for the reader.
    """

    cores: int
    most: int
    message: Line
    mean: dict[int, Line]
    meet: dict[int, Line]
    pipe: float
    stretch: dict[int, float] = field(default_factory=dict)
    name: str = "this machine"
    notes: tuple[str, ...] = ()

    def together(self, seconds: float, workers: int, processes: int, serial: float) -> float:
        """Seconds until `workers` workers with equal work are done, if they run at the same time."""
        each = -(-workers // processes)
        serialized = each * serial * self.stretched(processes) if each > 1 else 0.0
        return seconds * max(serialized, self.stretched(workers))

    def stretched(self, processes: int) -> float:
        """Times as long as work takes in so many processes at once; by default, as many run at a time as cores."""
        return self.stretch.get(processes, max(1.0, processes / self.cores))

    def hindered(self, processes: int) -> float:
        """The part of the stretch that other programs cause: times as long as messages take."""
        return self.stretched(processes) / max(1.0, processes / self.cores)

    def mean_of(self, ranks: int, processes: int, size: float) -> float:
        """Seconds that all ranks take to average a tensor of `size` bytes."""
        each, seconds = ranks // processes, 0.0
        if each > 1:
            seconds += _nearest(self.meet, each)(size)
        if processes > 1:
            seconds += _nearest(self.mean, processes)(size * each)
        return seconds * self.hindered(processes)

    def sent(self, size: float, processes: int) -> float:
        """Seconds of a message in a job of so many processes."""
        return self.message(size) * self.hindered(processes) if processes > 1 else 0.0


@dataclass(frozen=True)
class Forecast:
    """An iteration under a placement: seconds in all, and where process 0 spends them."""

    place: RunPlacement
    seconds: float
    act: float
    learn: float
    messages: float
    steps: int

    @property
    def waiting(self) -> float:
        """Seconds in which process 0 waits: for cores, for the interpreter, for other ranks."""
        return max(self.seconds - self.act - self.learn - self.messages, 0.0)

    @property
    def rate(self) -> float:
        """Steps of environments per second."""
        return self.steps / self.seconds

    @property
    def bottleneck(self) -> str:
        parts = {"acting": self.act, "learning": self.learn, "messages": self.messages, "waiting": self.waiting}
        return max(parts, key=lambda name: parts[name])


def on_device(costs: Costs, launches: float, numbers: float) -> Costs:
    """On other devices. launches: times as long as what does not grow with the environments takes, the launches of
    operators; numbers: as long as what does. Environments of the host, and those in workers, stay on cores."""
    scaled = {name: Line(line.fixed * launches, line.each * numbers) for name in ("act", "learn", "share", "host")
              if (line := getattr(costs, name))}  # fmt: skip
    if not costs.pure:
        spared = costs.host(costs.n_envs) - scaled["host"](costs.n_envs)
        scaled["act"] = Line(max(costs.act.fixed - spared, 0.0), costs.act.each)
    return replace(costs, **scaled)


def forecasts(costs: Costs, machine: Machine) -> list[Forecast]:
    """All placements that are possible, the fastest first."""
    return sorted((forecast(place, costs, machine) for place in places(costs, machine)), key=lambda f: f.seconds)


def places(costs: Costs, machine: Machine) -> Iterator[RunPlacement]:
    """Placements on 1, 2, 4, ... ranks, each of which has a process of its own, or all are threads of one."""
    for kind in PLACEMENTS:
        if kind in costs.refused:
            continue
        if kind == "fused":
            yield RunPlacement()
            continue
        ranks = 2
        while ranks <= min(machine.most, costs.limits.get(kind, machine.most)) and costs.n_envs % ranks == 0:
            if kind != "learners" or costs.batch % ranks == 0:
                for processes in sorted({1, ranks}) if kind in SPLIT else [1]:
                    if kind not in SPLIT or processes > 1 or ranks <= THREADS:
                        yield RunPlacement(kind, ranks, processes)
            ranks *= 2


def forecast(place: RunPlacement, costs: Costs, machine: Machine) -> Forecast:
    """Forecast an iteration under a placement."""
    parts = _FORMULAS[place.placement](place.ranks, place.processes, costs, machine)
    return Forecast(place, *parts, costs.n_envs * costs.n_steps)


def chosen(candidates: list[Forecast]) -> Forecast:
    """Choose the simplest placement within `NEAR` of the fastest. Placements that learn from older policies must be
    faster by the factor `WORTH`."""

    def cost(x: Forecast) -> float:
        return x.seconds * (WORTH if x.place.placement in OLDER else 1.0)

    least = min(map(cost, candidates))
    near = (x for x in candidates if cost(x) <= NEAR * least)
    return min(near, key=lambda x: (x.place.processes, x.place.ranks, cost(x)))


Parts = tuple[float, float, float, float]  # seconds in all, of acting, of learning, of messages


def _fused(r: int, p: int, c: Costs, m: Machine) -> Parts:
    alone = m.stretched(1)
    act, learn = alone * c.act(c.n_envs) / min(c.spread, m.cores), alone * c.learn(c.n_envs)
    return act + learn, act, learn, 0.0


def _learners(r: int, p: int, c: Costs, m: Machine) -> Parts:
    act, share = c.act(c.n_envs / r), c.share(c.n_envs / r)
    messages = c.means * m.mean_of(r, p, c.weights)
    return m.together(act + share, r, p, c.serial) + messages, act, share, messages


def _actors(r: int, p: int, c: Costs, m: Machine) -> Parts:
    act, learn = c.act(c.n_envs / r), m.stretched(1) * c.learn(c.n_envs)
    messages = (p - 1) * (m.sent(c.chunk(c.n_envs / p), p) + m.sent(c.policy, p))
    return m.together(act, r, p, c.serial) + learn + messages, act, learn, messages


def _async(r: int, p: int, c: Costs, m: Machine) -> Parts:
    act, learn = c.act(c.n_envs / r), r * c.learn(c.n_envs / r)
    answer = m.sent(c.chunk(c.n_envs / r), p) + m.sent(c.policy, p)
    messages, own, slow = (r - r // p) * answer, r // p * act, m.stretched(p)
    in_process = (learn + own + messages) * max(c.serial, 1 / max(m.cores // p, 1))
    shared = (learn + r * act + 2 * messages) * m.stretched(r) / r
    return max(learn * m.stretched(1), act * slow + answer, in_process * slow, shared), own, learn, messages


def _environments(r: int, p: int, c: Costs, m: Machine) -> Parts:
    host, learn = m.stretched(1) * c.host(c.n_envs), m.stretched(1) * c.learn(c.n_envs)
    step = m.together(c.step(c.n_envs / r), r, r, 0.0)
    messages = c.n_steps * r * m.pipe * m.hindered(r)
    return host + step + messages + learn, host, learn, messages


def _server(r: int, p: int, c: Costs, m: Machine) -> Parts:
    act, learn = c.act(c.n_envs / r), c.learn(c.n_envs / r)
    messages = (r - r // p) * 2 * m.sent(c.weights, p) + r * c.push
    return m.together(act + learn, r, p, c.serial) + messages, act, learn, messages


_FORMULAS = {
    "fused": _fused,
    "learners": _learners,
    "actors": _actors,
    "async": _async,
    "environments": _environments,
    "server": _server,
}


def _nearest(lines: dict[int, Line], count: int) -> Line:
    """The line of so many members, or that of the nearest number, scaled by it."""
    near = min(lines, key=lambda n: (abs(n - count), n))
    scale = 1.0 if near == count else (count - 1) / max(near - 1, 1)
    return Line(lines[near].fixed * scale, lines[near].each * scale)
