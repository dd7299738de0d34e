"""`tutti plan --serve`: how to serve a model on a cluster under a load, by simulating the engine on a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tutti.hardware import Cluster
from tutti.launch.progress import progress
from tutti.serve.bench import Arrival, Report, report
from tutti.serve.costs import Predicted, Served
from tutti.serve.simulate import SimulatedEngine, Sizes, simulate

MOST_PIPELINE = 4  # stages: a call runs them one after the other


LITTLE = 0.005  # of the goodput: less is no reason for engines apart
ENOUGH = 1 << 18  # blocks of a cache of 4 million tokens: more only cost memory to simulate


@dataclass(frozen=True)
class Group:
    """Engines of a kind. plan: of each. count: how many."""

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
    """A placement and what clients see of it."""

    placement: Placement
    report: Report
    slots: int  # tokens in all caches
    busy: tuple[float, ...]  # share of the time that each group computes

    def key(self) -> tuple[float, float, float]:
        """Better is smaller: goodput, throughput, time to first token."""
        found = self.report
        return -round(found.goodput, 2), -round(found.throughput, 0), found.ttft.get("p90", 0.0)


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

    config: of `transformers`. budget, most: tokens and sequences of a step of each engine.
    """

    def __init__(self, config: Any, cluster: Cluster, budget: int = 1024, most: int = 128,
                 dtype: torch.dtype = torch.bfloat16):  # fmt: skip
        self.cluster, self.budget, self.most = cluster, budget, most
        self.predicted = Predicted(config, dtype)
        self.refused: dict[str, str] = {}

    def engines(self) -> dict[str, tuple[Served, int]]:
        """The plans whose weights fit, with their predicted costs and numbers of devices."""
        found = {}
        with progress("predicting steps") as tell:
            for name, n in plans(self.cluster.size):
                tell(name)
                try:
                    found[name] = self.predicted.on(name, self.cluster.of(n)), n
                except ValueError as error:
                    self.refused[name] = str(error)
        if not found:
            raise ValueError(f"no plan fits {self.cluster}: {next(iter(self.refused.values()))}")
        return found

    def outcomes(self, load: Sequence[Arrival], ttft: float, tpot: float, apart: bool = True) -> list[Outcome]:
        """All placements, the best first. ttft, tpot: the objective, seconds. apart: also disaggregated ones."""
        engines = self.engines()
        placements = [Placement((Group(name, self.cluster.size // n, n),)) for name, (_, n) in engines.items()]
        found = []
        with progress("simulating the load") as tell:
            for placement in placements:
                tell(str(placement))
                found.append(self._outcome(placement, engines, load, ttft, tpot))
            found.sort(key=Outcome.key)
            for placement in self._apart(found, engines) if apart else ():
                tell(str(placement))
                found.append(self._outcome(placement, engines, load, ttft, tpot))
        return sorted(found, key=Outcome.key)

    def _apart(self, found: Sequence[Outcome], engines: dict[str, tuple[Served, int]]) -> Iterator[Placement]:
        """Disaggregated placements of the plans that do best together."""
        best = [x.placement.groups[0] for x in found[:4]]
        for first in best:
            for second in best:
                for share in (1 / 4, 1 / 2, 3 / 4):
                    prompts = round(self.cluster.size * share / first.devices)
                    rest = (self.cluster.size - prompts * first.devices) // second.devices
                    if prompts and rest:
                        yield Placement((Group(first.plan, prompts, first.devices),
                                         Group(second.plan, rest, second.devices)))  # fmt: skip

    def _outcome(self, placement: Placement, engines: dict[str, tuple[Served, int]], load: Sequence[Arrival],
                 ttft: float, tpot: float) -> Outcome:  # fmt: skip
        made = [[self._engine(engines[group.plan][0], i == 0 and len(placement.groups) == 2)
                 for _ in range(group.count)] for i, group in enumerate(placement.groups)]  # fmt: skip
        served = engines[placement.groups[0].plan][0]
        link = self.cluster.levels[-1][1].bandwidth * placement.groups[0].devices
        measured = simulate(load, made[0], made[1] if len(made) == 2 else (),
                            lambda tokens: tokens * served.slot_bytes / link)  # fmt: skip
        found = report(measured, ttft, tpot)
        slots = sum(engines[x.plan][0].slots * x.count for x in placement.groups)
        busy = tuple(sum(x.seconds for x in group) / len(group) / max(found.seconds, 1e-9) for group in made)
        return Outcome(placement, found, slots, busy)

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
