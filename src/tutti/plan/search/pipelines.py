"""The search of pipelines: number of devices, mesh of each device, schedule, and number of microbatches.

Longer pipelines are tried while they get faster. A pipeline is skipped if it would be slower than the best plan even
with evenly divided work and the shortest bubble of any schedule. Each pipeline has enough microbatches for a small
bubble. If the best pipeline still has a long bubble, or if nothing fits, it is also tried with the sequence in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from tutti.plan.explain import mesh_name
from tutti.plan.layouts.experts import travels
from tutti.plan.layouts.layout import Mesh
from tutti.plan.layouts.price import Pricer
from tutti.plan.pipeline.candidate import PipelineCandidate
from tutti.plan.pipeline.schedule import CHUNKED, PAIRED, Pipe
from tutti.plan.plan import PIPELINE
from tutti.plan.textbook import Textbook
from tutti.plan.variant import Variant

if TYPE_CHECKING:
    from tutti.plan.search.search import Search

MANY = 4  # microbatches per pipeline device
LEAST = 1 / 6  # lower bound of every schedule's bubble, as a share of (devices - 1) / microbatches
SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("auto", 1), ("auto", 2))  # (schedule, stages per device)
CHUNKS = (2, 4, 8)  # numbers of chunks of the sequence
LONG = 0.1  # try more chunks if the bubble exceeds this share of the step
NEARLY = 1.1  # also judge schedules that are modelled within this factor of the mesh's fastest


class Pipelines:
    """Searches the pipelines of a `Search`."""

    def __init__(self, search: Search):
        self.of = search
        self.fixed_devices = (search.mesh or {}).get(PIPELINE)

    @property
    def possible(self) -> bool:
        """Whether the cluster, the mesh and the batch allow a pipeline."""
        n, mesh = self.of.cluster.size, self.of.mesh
        return n > 1 and (PIPELINE in mesh if mesh else (self.of.accumulate or self.of.batch) > 1)

    def whole(self) -> None:
        """Consider pipelines that may be faster than the best plan that fits, within the budget."""
        search, before = self.of, None
        for devices in self.lengths() if self.possible else ():
            count = self.microbatches(devices)
            if (search.late and search.plans) or not self.promising(devices, count):
                continue
            candidates = list(self.candidates(devices, count))
            search.candidates += candidates
            search.consider(candidates)
            best = min((c.bound for c in candidates), default=None)
            if before and best and best > before and search.fastest is not None:
                return
            before = best or before

    def chunked(self) -> None:
        """Try the best pipeline with the sequence in chunks, and more of them while that helps."""
        search = self.of
        for sequence_chunks in CHUNKS:
            best = min((plan for plan in search.plans if plan.stages), key=search.rank, default=None)
            if best is None or best.sequence_chunks * 2 != sequence_chunks or search.late:
                return
            prediction = best.predicted
            waits = prediction.bubble_seconds >= LONG * prediction.step_seconds
            if search.fits(best) and (not waits or search.slower(prediction.step_seconds - prediction.bubble_seconds)):
                return
            pipe = Pipe(best.pipe.devices, CHUNKED, sequence_chunks=sequence_chunks)
            search.progress(f"pipelines of {pipe.devices} with the sequence in {sequence_chunks} chunks")
            try:
                planner = search.planner(best.accumulate, Variant(sequence_chunks))
                candidate = PipelineCandidate(search.candidate(planner.inside(pipe), best.inner), pipe, search.cluster)
            except ValueError:  # a token attends to later ones, or the length does not divide
                return
            search.candidates.append(candidate)
            search.consider([candidate])

    def lengths(self) -> list[int]:
        """Numbers of pipeline devices to try."""
        if self.fixed_devices:
            return [self.fixed_devices]
        n, layers = self.of.cluster.size, len(self.of.planner(self.of.accumulate or 1).layers)
        return [p for p in range(2, min(n, layers) + 1) if n % p == 0]

    def microbatches(self, devices: int) -> int:
        """The given number of microbatches, or the smallest that keeps the bubble small."""
        if self.of.accumulate:
            return self.of.accumulate
        counts = [n for n in range(1, self.of.batch + 1) if self.of.batch % n == 0]
        return next((n for n in counts if n >= MANY * devices), counts[-1])

    def promising(self, devices: int, count: int) -> bool:
        """Whether a pipeline with equal stages and the shortest bubble would be faster than the fastest plan."""
        search = self.of
        if search.fastest is None or self.fixed_devices:
            return True
        return not search.slower(self.ideal * (1 + LEAST * (devices - 1) / count))

    @cached_property
    def ideal(self) -> float:
        """Seconds of a step whose unsplit operators are divided evenly over all devices."""
        planner = self.of.planner(self.of.accumulate or 1)
        pricer, operators = Pricer(self.of.cluster.of(1), {}, whole=False), planner.problem.operators.values()
        whole = sum(o.count * planner.runs.get(o.phase, 1) * pricer.compute(o, {}) for o in operators)
        return whole / self.of.cluster.size

    def candidates(self, devices: int, count: int) -> Iterator[PipelineCandidate]:
        """For every mesh of a device, the candidates of the schedules that are about as fast as the fastest."""
        search, planner = self.of, self.of.planner(count)
        for i, mesh in enumerate(meshes := self.meshes(devices)):
            if search.late and (i or search.plans):
                return
            where = f"pipelines of {devices}, mesh {mesh_name(mesh)} on each, with {count} microbatches"
            search.progress(f"{where} ({i + 1} of {len(meshes)})")
            candidates: list[PipelineCandidate] = []
            paired, hiding = Pipe(devices, PAIRED, 2), None
            try:
                inner = search.candidate(planner.inside(Pipe(devices)), mesh, len(meshes) - i)
                if count >= 2 * devices and travels(inner.chosen.choices):
                    hiding = search.candidate(planner.inside(paired), mesh, len(meshes) - i)
            except ValueError as error:  # a pin is not possible on this mesh
                search.impossible = error
                continue
            pipes = [(inner, Pipe(devices, *schedule)) for schedule in SCHEDULES]
            for candidate, pipe in [*pipes, *([(hiding, paired)] if hiding else [])]:
                try:
                    candidates.append(PipelineCandidate(candidate, pipe, search.cluster))
                except ValueError as error:  # too many stages, indivisible microbatches, or no cut
                    search.impossible = search.impossible or error
            least = min((c.chosen.seconds for c in candidates if c.pipe != paired), default=0.0)
            yield from (c for c in candidates if c.pipe == paired or c.chosen.seconds <= NEARLY * least)

    def meshes(self, devices: int) -> list[Mesh]:
        """Meshes of one pipeline device, of one or two axes. The inner axis is within a node."""
        search = self.of
        if search.mesh:
            return [{axis: n for axis, n in search.mesh.items() if axis != PIPELINE} or {"dp": 1}]
        n, node = search.cluster.size // devices, search.cluster.levels[0][0]
        return [Textbook(n // k, k).mesh for k in range(1, min(n, node) + 1) if n % k == 0 and (k == 1 or k < n)]
