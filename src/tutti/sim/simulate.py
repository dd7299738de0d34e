"""Simulate Programs: predict the step's time, its communication and its memory.

>>> from tutti.hardware import Cluster
>>> made = simulate([program], Cluster.parse("h100:8"))    # doctest: +SKIP
>>> made.seconds, made.exposed, made.memory[0].peak        # doctest: +SKIP
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tutti.analysis.kernels import fuse
from tutti.analysis.memory import Memory, memory, platform
from tutti.analysis.prices import Prices
from tutti.analysis.replay import Replay, replay
from tutti.hardware import Cluster
from tutti.ir.op_info import FLOPS
from tutti.lower.program import Program
from tutti.plan.layouts.layout import Mesh, devices
from tutti.sim.clock import Clock, Span, Stall
from tutti.sim.tasks import COMPUTE, Task, tasks_of


@dataclass(frozen=True)
class Simulation:
    """The result of simulating some ranks.

    seconds: seconds until the last rank is done. tasks, memory, replays: tasks, memory and replay of each rank. flops:
    FLOPs of matrix work on all devices; ranks that were not simulated count as the mean of the others. spans: the times
    of all tasks. stalls: times in which a rank was blocked, and the collective it waited for.
    """

    seconds: float
    flops: float
    mesh: Mesh
    tasks: Mapping[int, Sequence[Task]]
    spans: Sequence[Span]
    stalls: Sequence[Stall]
    memory: Mapping[int, Memory]
    replays: Mapping[int, Replay]

    @property
    def ranks(self) -> list[int]:
        return sorted(self.tasks)

    def task(self, span: Span | Stall) -> Task:
        return self.tasks[span.rank][span.number]

    def busy(self, rank: int) -> dict[str, float]:
        """Seconds in which each stream of a rank works, by "compute" or mesh axis."""
        seconds: dict[str, float] = defaultdict(float)
        for span in self.spans:
            if span.rank == rank:
                seconds[self.task(span).stream] += span.end - span.begin
        return dict(seconds)

    def idle(self, rank: int) -> dict[str, float]:
        """Seconds in which each stream of a rank is idle."""
        return {stream: self.seconds - busy for stream, busy in self.busy(rank).items()}

    def exposed(self, rank: int) -> dict[tuple[str, str], float]:
        """Seconds in which a rank is blocked by collectives, by (kind, axis)."""
        seconds: dict[tuple[str, str], float] = defaultdict(float)
        for stall in self.stalls:
            if stall.rank == rank:
                task = self.task(stall)
                seconds[task.kind, task.stream] += stall.end - stall.begin
        return dict(seconds)

    def communication(self, rank: int) -> dict[tuple[str, str], tuple[int, int, float]]:
        """(count, bytes sent, seconds in flight, hidden or not) of collectives, by (kind, axis)."""
        totals: dict[tuple[str, str], tuple[int, int, float]] = {}
        for span in self.spans:
            task = self.task(span)
            if span.rank == rank and task.kind:
                count, sent, took = totals.get((task.kind, task.stream), (0, 0, 0.0))
                totals[task.kind, task.stream] = count + 1, sent + task.bytes, took + span.end - span.begin
        return totals

    def slowest(self, rank: int) -> list[tuple[str, str, int, float]]:
        """(label, phase, count, seconds) of a rank's computations, the slowest first."""
        totals: dict[tuple[str, str], list] = defaultdict(lambda: [0, 0.0])
        for span in self.spans:
            task = self.task(span)
            if span.rank == rank and task.stream == COMPUTE:
                entry = totals[task.name, task.phase]
                entry[:] = entry[0] + 1, entry[1] + span.end - span.begin
        rows = [(name, phase, count, took) for (name, phase), (count, took) in totals.items()]
        return sorted(rows, key=lambda row: -row[3])


def simulate(
    programs: Sequence[Program],
    cluster: Cluster,
    level: str = "O0",
    *,
    slower: Mapping[int, float] | None = None,
) -> Simulation:
    """Simulate the Programs of some ranks.

    programs: after `analysis.passes.improve`. Give one of several equal ranks; ranks that are not given reach a
        collective when the given ones of their group do.
    level: what is fused.
    slower: factor on a rank's computing time; all compute as fast as the slowest device of the cluster.

    Raises ValueError if the cluster and the mesh have different numbers of devices.
    """
    mesh = programs[0].mesh
    if devices(mesh) != cluster.size:
        raise ValueError(f"the plan is for {devices(mesh)} devices, {cluster} has {cluster.size}")
    tasks, memories, replays = {}, {}, {}
    for program in programs:
        fused = fuse(replay(program), level)
        replays[program.rank] = fused
        tasks[program.rank] = tasks_of(fused, Prices(cluster, program))
        memories[program.rank] = memory(fused, platform(cluster.device))
    waits_for = cluster.device.slowest(cluster.size)
    pace = {rank: waits_for * (slower or {}).get(rank, 1.0) for rank in tasks}
    clock = Clock(tasks, mesh, pace, cluster.device.yields)
    seconds = clock.run()
    work = sum(task.flops for todo in tasks.values() for task in todo) * devices(mesh) / len(programs)
    return Simulation(seconds, work, mesh, tasks, clock.spans, clock.stalls, memories, replays)


def dtype_of(programs: Iterable[Program]) -> torch.dtype:
    """The dtype of most of the matrix work."""
    work: dict[torch.dtype, int] = defaultdict(int)
    for node in (node for program in programs for node in program.graph.nodes):
        if node.target in FLOPS:
            val = node.meta["val"]
            spec = next(s for s in val if s) if isinstance(val, tuple) else val
            work[spec.dtype] += FLOPS[node.target](node)
    return max(work, key=lambda dtype: work[dtype], default=torch.float32)
