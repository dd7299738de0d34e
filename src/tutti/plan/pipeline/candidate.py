"""Pipelines for the plans of a mesh: the model is cut into stages, and each pipeline device is such a mesh.

The choices of operators are searched for the whole model on the mesh of one pipeline device. Their memory includes the
activations of all microbatches in flight. Their costs per layer determine where the model is cut
(`plan.pipeline.cuts`), the duration of each stage, and the end of the schedule. Layers of different kinds (an
encoder's, a decoder's, the head) may use the axes of the mesh differently. Layers of one kind use them alike in every
stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from tutti.hardware import Cluster
from tutti.plan.layouts.layout import Mesh, devices
from tutti.plan.network.sharding_problem import Solution
from tutti.plan.pipeline.cuts import Layer, split, together
from tutti.plan.pipeline.schedule import Pipe
from tutti.plan.pipeline.slots import Durations, Schedule, in_flight, makespan
from tutti.plan.pipeline.stages import stages_of
from tutti.plan.plan import PIPELINE, Plan

if TYPE_CHECKING:
    from tutti.plan.planner import Candidate


@dataclass(frozen=True)
class Staged(Solution):
    """Choices with a cut.

    starts: the first layer of each stage.
    durations: modelled seconds of each stage, as in `plan.pipeline.slots`.
    seconds, cost, bound: seconds, cost and bound of the pipeline. memory: bytes of the device that needs most.
    """

    starts: tuple[int, ...] = ()
    durations: Durations = ()


class PipelineCandidate:
    """A candidate of the search, like `Candidate`, whose plans are pipelines.

    candidate: the candidate for one pipeline device.

    Raises ValueError if there are fewer layers than stages, or if the schedule does not allow this number of stages.
    """

    def __init__(self, candidate: Candidate, pipe: Pipe, cluster: Cluster):
        self.candidate, self.pipe, self.cluster, self.planner = candidate, pipe, cluster, candidate.planner
        self.microbatches = candidate.planner.accumulate
        self.schedule = pipe.of(self.microbatches)  # for stages of equal duration
        self.in_flight = in_flight(self.schedule)
        self.mesh = self.wide(candidate.mesh)
        self.chosen = self.staged(candidate.chosen)

    def named(self, starts: Sequence[int]) -> dict[str, int]:
        """The stage of each layer."""
        return {path: sum(start <= i for start in starts) - 1 for i, path in enumerate(self.planner.layers.members)}

    def wide(self, mesh: Mesh) -> Mesh:
        """The mesh of all devices."""
        return {PIPELINE: self.pipe.devices, **{axis: n for axis, n in mesh.items() if n > 1}}

    @property
    def bound(self) -> float:
        """Modelled seconds of the cheapest choices less their gap, by which the search orders pipelines."""
        return self.chosen.bound

    def staged(self, chosen: Solution, memory: float = inf) -> Staged:
        """Cut the model optimally for devices with this memory. Raises ValueError if it cannot be cut there."""
        layers = list(self.planner.layers.of(self.candidate.joint.costs(chosen)).values())
        count = self.pipe.stages
        if len(layers) < count:
            raise ValueError(
                f"a model of {len(layers)} layers and modules beside them cannot be cut into {count} stages"
            )
        in_flight_of = [self.in_flight[d][s] for s, d in enumerate(self.schedule.place)]
        starts = split(layers, count, in_flight_of, memory / self.pipe.chunks, self.planner.layers.inside)
        stages_of(self.planner.layers.reads, self.named(starts))  # raises ValueError if it cannot be cut there
        stages = together(layers, starts)
        update, memory_of = [0.0] * self.pipe.devices, [0.0] * self.pipe.devices
        for s, d in enumerate(self.schedule.place):
            update[d] += stages[s].update
            memory_of[d] += stages[s].stored + self.in_flight[d][s] * stages[s].activations
        durations = self.durations(chosen, stages, starts)
        seconds = makespan(self.ordered(durations), durations) + max(update)
        fields = {**vars(chosen), "seconds": seconds, "cost": seconds, "bound": seconds * (1 - chosen.gap)}
        return Staged(**{**fields, "memory": max(memory_of)}, starts=tuple(starts), durations=durations)

    def ordered(self, durations: Durations) -> Schedule:
        return self.pipe.of(self.microbatches, durations) if self.pipe.schedule == "auto" else self.schedule

    def durations(self, chosen: Solution, stages: Sequence[Layer], starts: Sequence[int]) -> Durations:
        """Modelled durations of the stages, rounded to three digits to keep saved plans readable."""
        pricer, width = self.candidate.joint.pricer, devices(self.candidate.mesh)
        rows = []
        for stage, start in zip(stages, [*starts[1:], 0], strict=True):
            crossing = self.planner.layers.borders[start - 1] if start else {}
            sent = sum(
                count * pricer.made_bytes(self.planner.problem.operators[label], index, chosen.choices[label])
                for (label, index), count in crossing.items()
            )
            way = self.cluster.time("ppermute", sent, width, self.pipe.devices) if sent else 0.0
            rows.append(tuple(float(f"{t:.3g}") for t in (stage.forward, stage.backward, stage.rest, way)))
        return tuple(rows)

    def within(self, most: float, deadline: float) -> Staged:
        """The fastest choices found that keep at most `most` bytes per device; the smallest found if none do."""
        with suppress(ValueError):  # there is no cut that fits
            chosen = self.staged(self.candidate.chosen, most)
            if chosen.memory > most:
                share = most / chosen.memory
                chosen = self.staged(self.candidate.within(share * self.candidate.chosen.memory, deadline), most)
            return chosen
        return self.chosen

    def smallest(self) -> Staged:
        """The choices that keep the fewest bytes."""
        smallest = self.candidate.smallest()
        try:
            return self.staged(smallest, 0.0)
        except ValueError:
            return self.staged(smallest)

    def plan(self, chosen: Solution | None = None, gathered: bool = False) -> Plan:
        """The plan of some choices, as in `Candidate.plan`."""
        chosen = chosen or self.chosen
        assert isinstance(chosen, Staged)
        plan = self.candidate.plan(chosen, gathered)
        return plan.replace(
            mesh=self.wide(plan.mesh), stages=self.named(chosen.starts),
            schedule=self.pipe.schedule if self.planner.step.repeats else "",
            sequence_chunks=self.pipe.sequence_chunks, durations=chosen.durations, cluster=str(self.cluster),
            name=joined(self.pipe, plan.name),
            reasons=(*plan.reasons[:-1], f"{plan.reasons[-1]} in sum, on the mesh of a device of the pipeline"),
        )  # fmt: skip


def joined(pipe: Pipe, name: str) -> str:
    """The name of a plan on each device of a pipeline (`auto-dp2`), with the pipeline (`auto-pp2xdp2`)."""
    inside = name.removeprefix("auto-")
    whole = f"{pipe}x{inside}" if inside != "single" else str(pipe)
    return f"auto-{whole}" if name.startswith("auto-") else whole
