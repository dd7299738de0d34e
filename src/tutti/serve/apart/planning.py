"""`tutti plan --serve`: how to serve a model on a cluster under a load, by simulating the engine on a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from tutti.hardware import Cluster
from tutti.progress import Say, silent
from tutti.serve.apart.costs import Predicted, Served
from tutti.serve.apart.simulate import SimulatedEngine, Sizes, simulate
from tutti.serve.bench import Arrival, LoadReport, report
from tutti.serve.values import Model

MOST_PIPELINE = 4  # stages: a call runs them one after the other


LITTLE = 0.005  # of the goodput or the requests: less is no reason for engines apart, or for more devices
ENOUGH = 1 << 18  # blocks of a cache of 4 million tokens: more only cost memory to simulate


@dataclass(frozen=True)
class Group:
    """Engines of a kind. plan: plan of each. count: number of engines. devices: number of devices of each."""

    plan: str
    count: int
    devices: int

    def __str__(self) -> str:
        return f"{self.count} x {self.plan}"


@dataclass(frozen=True)
class Placement:
    """How a cluster is used: one group, or one for prompts and one that generates."""

    groups: tuple[Group, ...]

    def __str__(self) -> str:
        if len(self.groups) == 1:
            return str(self.groups[0])
        return f"prompts {self.groups[0]}, generation {self.groups[1]}"


@dataclass(frozen=True)
class Outcome:
    """A placement and what clients see of it.

    slots: tokens in all caches. busy: share of the time that each group computes. tight: whether the cache of an engine
    is too small for as many sequences at once as the engine takes, of usual length: some then wait for room.
    """

    placement: Placement
    report: LoadReport
    slots: int
    busy: tuple[float, ...]
    tight: bool = False

    @property
    def devices(self) -> int:
        return sum(group.count * group.devices for group in self.placement.groups)

    @property
    def in_time(self) -> float:
        """The share of the requests that are answered within the objective."""
        return self.report.goodput * self.report.seconds / self.report.requests

    def key(self) -> tuple[float, float, float]:
        """Better is smaller: goodput, throughput, time to first token."""
        report = self.report
        return -round(report.goodput, 2), -round(report.throughput, 0), report.ttft.get("p90", 0.0)


def plans(devices: int) -> Iterator[tuple[str, int]]:
    """Names of plans of up to so many devices, with their numbers of devices."""
    sizes = [n for n in range(1, devices + 1) if devices % n == 0]
    for n in sizes:
        for stages in sizes:
            width = n // stages
            if n % stages or stages > MOST_PIPELINE:
                continue
            yield "x".join([f"pp{stages}"] * (stages > 1) + [f"tp{width}"] * (width > 1)) or "single", n


class ServingPlanner:
    """Compares placements of a model on a cluster.

    config: config of `transformers`. budget, most: tokens and sequences of a step of each engine. progress: called with
    what is being done. stop: whether to end, once there is an outcome. seen: called with each outcome.
    """

    def __init__(
        self,
        config: Model,
        cluster: Cluster,
        budget: int = 1024,
        most: int = 128,
        dtype: torch.dtype = torch.bfloat16,
        *,
        progress: Say = silent,
        stop: Callable[[], bool] = lambda: False,
        seen: Callable[[Outcome], None] = lambda outcome: None,
    ):
        self.cluster, self.budget, self.most = cluster, budget, most
        self.progress, self.stop, self.seen = progress, stop, seen
        progress("reading the model")
        self.predicted = Predicted(config, dtype)
        self.engines: dict[str, Served] = {}  # of the plans whose weights fit
        self.refused: dict[str, str] = {}
        self.left = 0  # plans and placements that were left out at the stop

    def outcomes(self, load: Sequence[Arrival], ttft: float, tpot: float, apart: bool = True) -> list[Outcome]:
        """All placements, the best first. ttft, tpot: the objective, seconds. apart: also disaggregated ones.

        Raises ValueError if the weights fit under no plan.
        """
        outcomes: list[Outcome] = []

        def simulated(placement: Placement) -> None:
            outcomes.append(self._outcome(placement, load, ttft, tpot))
            self.seen(outcomes[-1])

        self.left = 0
        for name, n in plans(self.cluster.size):
            if outcomes and self.stop():
                self.left += 1
                continue
            self.progress(f"predicting the steps of {name}")
            try:
                self.engines[name] = self.predicted.on(name, self.cluster.of(n))
            except ValueError as error:
                self.refused[name] = str(error)
                continue
            simulated(Placement((Group(name, self.cluster.size // n, n),)))
        if not outcomes:
            raise ValueError(f"no plan fits {self.cluster}: {list(self.refused.values())[-1]}")
        for placement in list(self._apart(sorted(outcomes, key=Outcome.key))) if apart else ():
            if self.stop():
                self.left += 1
            else:
                simulated(placement)
        return sorted(outcomes, key=Outcome.key)

    def fewer(self, best: Outcome, load: Sequence[Arrival], ttft: float, tpot: float) -> Outcome | None:
        """A placement on fewer devices, halved repeatedly, that keeps about as many requests in time as the best."""
        enough, devices = None, best.devices // 2
        while devices and not self.stop():
            placements = [
                Placement((Group(name, devices // n, n),)) for name, n in plans(devices) if name in self.engines
            ]
            outcomes = [self._outcome(placement, load, ttft, tpot) for placement in placements]
            outcomes = [x for x in outcomes if x.in_time >= best.in_time - LITTLE]
            if not outcomes:
                break
            enough, devices = min(outcomes, key=Outcome.key), devices // 2
        return enough

    def _apart(self, outcomes: Sequence[Outcome]) -> Iterator[Placement]:
        """Disaggregated placements of the plans that do best together. outcomes: the best first."""
        best = [x.placement.groups[0] for x in outcomes[:4]]
        for first in best:
            for second in best:
                for share in (1 / 4, 1 / 2, 3 / 4):
                    prompts = round(self.cluster.size * share / first.devices)
                    rest = (self.cluster.size - prompts * first.devices) // second.devices
                    if prompts and rest:
                        yield Placement((Group(first.plan, prompts, first.devices),
                                         Group(second.plan, rest, second.devices)))  # fmt: skip

    def _outcome(self, placement: Placement, load: Sequence[Arrival], ttft: float, tpot: float) -> Outcome:
        self.progress(f"simulating the load on {placement}")
        engines, apart = self.engines, len(placement.groups) == 2
        groups = [[self._engine(engines[group.plan], apart and i == 0) for _ in range(group.count)]
                  for i, group in enumerate(placement.groups)]  # fmt: skip
        served = engines[placement.groups[0].plan]
        link = self.cluster.levels[-1][1].bandwidth * placement.groups[0].devices
        answers = simulate(load, groups[0], groups[1] if apart else (),
                           lambda tokens: tokens * served.slot_bytes / link)  # fmt: skip
        clients = report(answers, ttft, tpot)
        slots = sum(engines[x.plan].slots * x.count for x in placement.groups)
        usual = sum(int(x.prompt) + x.tokens for x in load) / len(load)
        tight = any(engines[x.plan].slots < self.most * usual for x in placement.groups)
        busy = tuple(sum(x.seconds for x in group) / len(group) / max(clients.seconds, 1e-9) for group in groups)
        return Outcome(placement, clients, slots, busy, tight)

    def _engine(self, served: Served, hands_on: bool) -> SimulatedEngine:
        blocks = min(served.slots // 16, ENOUGH)
        return SimulatedEngine(Sizes(blocks, 16, self.budget, self.most), served.costs, hands_on)


def why(outcomes: Sequence[Outcome]) -> str:
    """Why the first placement is chosen, and whether disaggregation pays."""
    first = outcomes[0]
    lines = [f"{first.placement}: {first.report.goodput:.2f} good requests/s"]
    if len(outcomes) > 1:
        other = outcomes[1]
        lines[0] += f"; the runner-up, {other.placement}, has {other.report.goodput:.2f}"
    together = next((x for x in outcomes if len(x.placement.groups) == 1), None)
    apart = next((x for x in outcomes if len(x.placement.groups) == 2), None)
    if together and apart:
        gain = apart.report.goodput / max(together.report.goodput, 1e-9) - 1
        better = Outcome.key(apart) < Outcome.key(together)
        verdict = "changes little" if abs(gain) < LITTLE else "pays" if better else "does not pay"
        before, after = (x.report.tpot.get("p90", 0) * 1e3 for x in (together, apart))
        lines.append(
            f"disaggregation {verdict}: the best has {100 * gain:+.1f} % goodput, 90 % of first "
            f"tokens within {apart.report.ttft.get('p90', 0) * 1e3:.0f} ms against "
            f"{together.report.ttft.get('p90', 0) * 1e3:.0f} ms, of further ones within "
            f"{after:.1f} ms against {before:.1f} ms; "
            f"its prompt engines compute {apart.busy[0]:.0%} of the time, the others {apart.busy[1]:.0%}"
        )
    elif together:
        lines.append("disaggregation is not possible: one engine needs more than half of the devices")
    return "\n".join(lines)
