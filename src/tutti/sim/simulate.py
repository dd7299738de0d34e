"""Simulate Programs: the step's time, what of it is communication, and the memory, before anything is run.

>>> from tutti.hardware import Cluster
>>> made = simulate([program], Cluster.parse("h100:8"))    # doctest: +SKIP
>>> made.seconds, made.exposed, made.memory[0].peak        # doctest: +SKIP
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tutti.analysis.kernels import fuse
from tutti.analysis.memory import Memory, memory, platform
from tutti.analysis.prices import Prices
from tutti.analysis.replay import Replay, replay
from tutti.hardware import Cluster
from tutti.ir.costs import FLOPS
from tutti.lower.program import Program
from tutti.plan.layout import Mesh, devices
from tutti.sim.clock import Clock, Span, Stall
from tutti.sim.tasks import COMPUTE, Task, tasks_of


@dataclass(frozen=True)
class Simulation:
    """What became of some ranks on a clock.

    seconds: until the last is done. tasks, memory, replays: by rank. flops: of all devices' work on matrices; those
    that were not simulated count as the mean of those that were. spans: every task's time. stalls: when a rank
    computed nothing, and for which collective.
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
        """Seconds in which each stream of a rank works: "compute", and each axis."""
        found: dict[str, float] = defaultdict(float)
        for span in self.spans:
            if span.rank == rank:
                found[self.task(span).stream] += span.end - span.begin
        return dict(found)

    def idle(self, rank: int) -> dict[str, float]:
        """Seconds in which each stream of a rank does nothing."""
        return {stream: self.seconds - busy for stream, busy in self.busy(rank).items()}

    def exposed(self, rank: int) -> dict[tuple[str, str], float]:
        """Seconds in which a rank computes nothing for waiting for collectives: by (kind, axis)."""
        found: dict[tuple[str, str], float] = defaultdict(float)
        for stall in self.stalls:
            if stall.rank == rank:
                task = self.task(stall)
                found[task.kind, task.stream] += stall.end - stall.begin
        return dict(found)

    def communication(self, rank: int) -> dict[tuple[str, str], tuple[int, int, float]]:
        """By (kind, axis): how many collectives, bytes sent, and seconds under way, hidden or not."""
        found: dict[tuple[str, str], tuple[int, int, float]] = {}
        for span in self.spans:
            task = self.task(span)
            if span.rank == rank and task.kind:
                count, sent, took = found.get((task.kind, task.stream), (0, 0, 0.0))
                found[task.kind, task.stream] = count + 1, sent + task.bytes, took + span.end - span.begin
        return found

    def slowest(self, rank: int) -> list[tuple[str, str, int, float]]:
        """(label, phase, how many, seconds) of what a rank computes, the most seconds first."""
        found: dict[tuple[str, str], list] = defaultdict(lambda: [0, 0.0])
        for span in self.spans:
            task = self.task(span)
            if span.rank == rank and task.stream == COMPUTE:
                entry = found[task.name, task.phase]
                entry[:] = entry[0] + 1, entry[1] + span.end - span.begin
        rows = [(name, phase, count, took) for (name, phase), (count, took) in found.items()]
        return sorted(rows, key=lambda row: -row[3])


def simulate(
    programs: Sequence[Program],
    cluster: Cluster,
    level: str = "O0",
    *,
    slower: Mapping[int, float] | None = None,
    held: Mapping[str, int] | None = None,
) -> Simulation:
    """Run the Programs of some ranks on a clock.

    programs: after `exec.levels.improve`. Of ranks that are alike one stands for all: ranks that are not given are
        taken to be at a collective when the given ones of their group are.
    level: what is fused (`exec.levels`, `simulated.kernels`).
    slower: how many times longer a rank takes to compute. held: bytes by kind that are kept beside the Program's own.

    ValueError where the cluster has another number of devices than the mesh.
    """
    mesh = programs[0].mesh
    if devices(mesh) != cluster.size:
        raise ValueError(f"the plan is for {devices(mesh)} devices, {cluster} has {cluster.size}")
    tasks, memories, replays = {}, {}, {}
    for program in programs:
        played = fuse(replay(program), level)
        replays[program.rank] = played
        tasks[program.rank] = tasks_of(played, Prices(cluster, program))
        memories[program.rank] = memory(played, platform(cluster.device), held)
    clock = Clock(tasks, mesh, slower)
    seconds = clock.run()
    work = sum(task.flops for todo in tasks.values() for task in todo) * devices(mesh) / len(programs)
    return Simulation(seconds, work, mesh, tasks, clock.spans, clock.stalls, memories, replays)


def dtype_of(program: Program) -> torch.dtype:
    """The dtype in which most of the work on matrices is done."""
    work: dict[torch.dtype, int] = defaultdict(int)
    for node in program.graph.nodes:
        if node.target in FLOPS:
            made = node.meta["val"]
            spec = next(s for s in made if s) if isinstance(made, tuple) else made
            work[spec.dtype] += FLOPS[node.target](node)
    return max(work, key=lambda dtype: work[dtype], default=torch.float32)
