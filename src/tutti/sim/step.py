"""What a dry run knows of a step: its parts, and the time, communication and memory that they add up to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from tutti.analysis.memory import Memory
from tutti.analysis.passes import improve
from tutti.hardware import Cluster
from tutti.hardware.device import dtype_name
from tutti.lower.collectives import ppermute
from tutti.lower.program import Program
from tutti.plan.layouts.layout import devices
from tutti.plan.plan import Prediction
from tutti.sim.simulate import Simulation, dtype_of
from tutti.sim.tasks import HOST_COMPUTES, IN, OUT

BESIDE = (OUT, IN, HOST_COMPUTES)
RANK = 0  # all ranks run equal Programs, so one is simulated


@dataclass(frozen=True)
class SimulatedPart:
    """A Program that runs `runs` times in a step."""

    name: str
    program: Program
    simulation: Simulation
    runs: int = 1

    @property
    def title(self) -> str:
        return self.name + (f", {self.runs} times" if self.runs > 1 else "")

    @property
    def seconds(self) -> float:
        return self.runs * self.simulation.seconds


@dataclass(frozen=True)
class DryRun:
    """The prediction for a step. flops: FLOPs of the model's step on all devices. peak: FLOP/s of all devices."""

    parts: tuple[SimulatedPart, ...]
    flops: float
    peak: float
    cluster: Cluster
    level: str

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def fraction_of_peak(self) -> float:
        return self.flops / (self.peak * self.seconds)

    @property
    def bubble(self) -> float:
        """Seconds in which a rank waits for other devices of a pipeline."""
        return 0.0

    @property
    def counted(self) -> list[SimulatedPart]:
        """The parts that one rank runs."""
        return list(self.parts)

    @property
    def compute(self) -> float:
        """Seconds in which a rank computes."""
        return sum(p.runs * p.simulation.busy(RANK).get("compute", 0.0) for p in self.counted)

    @property
    def memory(self) -> Memory:
        """The memory of the Program with the highest peak. On other tiers, the most that any Program needs."""
        each = [p.simulation.memory[RANK] for p in self.parts]
        tiers = {tier: max(m.tiers.get(tier, 0) for m in each) for m in each for tier in m.tiers}
        return replace(max(each, key=lambda m: m.peak), tiers=tiers)

    def communication(self) -> dict[tuple[str, str], tuple[int, int, float, float]]:
        """(count, bytes sent by a rank, seconds in flight, exposed seconds), by (kind, axis)."""
        totals: dict[tuple[str, str], tuple[int, int, float, float]] = {}
        for part in self.counted:
            exposed = part.simulation.exposed(RANK)
            for key, (count, sent, took) in part.simulation.communication(RANK).items():
                new = (count, sent, took, exposed.get(key, 0.0))
                old = totals.get(key, (0, 0, 0.0, 0.0))
                totals[key] = tuple(a + part.runs * b for a, b in zip(old, new, strict=True))  # pyright: ignore
        return totals

    def prediction(self) -> Prediction:
        """The prediction that a plan stores."""
        every, memory = self.communication(), self.memory
        communication = {key: row for key, row in every.items() if key[1] not in BESIDE}
        return Prediction(
            self.seconds,
            self.compute,
            sum(exposed for *_, exposed in communication.values()),
            sum(sent for _, sent, *_ in communication.values()),
            self.fraction_of_peak,
            memory.peak,
            dict(memory.kinds),
            {f"{kind} over {axis}": [count, sent] for (kind, axis), (count, sent, *_) in every.items()},
            self.level,
            self.bubble,
            sum(exposed for key, (*_, exposed) in every.items() if key[1] in BESIDE),
            dict(memory.tiers),
            sum(max(0.0, took - exposed) for *_, took, exposed in communication.values()),
            dtype_name(self.cluster.device.dtype_with_peak(dtype_of(part.program for part in self.parts))),
        )

    def slowest(self) -> list[tuple[str, str, int, float]]:
        """(label, phase, count, seconds), the slowest first."""
        totals: dict[tuple[str, str], list] = defaultdict(lambda: [0, 0.0])
        for part in self.counted:
            for name, phase, count, took in part.simulation.slowest(RANK):
                entry = totals[name, phase]
                entry[:] = entry[0] + part.runs * count, entry[1] + part.runs * took
        return sorted(((n, p, count, took) for (n, p), (count, took) in totals.items()), key=lambda row: -row[3])


def lowered(make: Callable[[int], Program], level: str, hidden: Cluster | None) -> Program:
    """The Program of one rank as it runs. make: gives the Program of a rank. hidden: the cluster to hide communication
    for (`analysis.overlap`), or None.

    In causal ring attention over contiguous parts, ranks have unequal work and would choose different orders, so the
    order is kept, and the last rank, which has the most work, stands for all.
    """
    program = make(RANK)
    if any(node.target is ppermute for node in program.graph.nodes):
        last = make(devices(program.mesh) - 1)
        if [n.target for n in last.graph.nodes] != [n.target for n in program.graph.nodes]:
            program, hidden = replace(last, rank=RANK), None
    return improve(program, level, hidden)


def peak_of(programs: Iterable[Program], cluster: Cluster) -> float:
    """Peak FLOP/s of all devices in the dtype of most of the matrix work, in float32 if that is unknown."""
    try:
        return cluster.peak(dtype_of(programs))
    except ValueError:
        return cluster.peak("float32")
