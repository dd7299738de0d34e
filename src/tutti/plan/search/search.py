"""The search over meshes and microbatches for the fastest plan that fits in memory.

A candidate's choices give its modelled cost (`plan.planner.Candidate`). A *judge* predicts the actual cost by
simulating the Programs of a plan (`tutti.sim`). Candidates are judged in the order of their lower bounds, which assume
that memory is free. Judging stops at the first candidate whose bound does not beat the best plan found, or when the
budget is spent. A plan that does not fit is made smaller by a price on memory.

If memory is scarce or the step is large, named plans are searched first (`plan.search.leading`). These follow, each
only if it can improve the result:

- plans without pipelines on meshes of one to three axes (`plan.search.single_stage`);
- pipelines (`plan.search.pipelines`), unless named ones were searched for a large step;
- recomputation, if faster plans do not fit (`plan.search.fit_by_recompute`);
- offloading, if nothing fits (`plan.search.offload`);
- copies of the batch, or regions in parts, to overlap communication (`plan.search.copies`);
- pipelines over chunks of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Protocol

from tutti.hardware import Cluster
from tutti.ir.step_graph import Call, StepGraph
from tutti.plan.explain import counted, mesh_name
from tutti.plan.layouts.layout import Mesh, devices
from tutti.plan.layouts.pin import Pin
from tutti.plan.network.work import WorkClock
from tutti.plan.pipeline.candidate import PipelineCandidate
from tutti.plan.plan import DECISIONS, Plan, Prediction
from tutti.plan.planner import Candidate, Planner
from tutti.plan.search import reasons
from tutti.plan.search.copies import Copies
from tutti.plan.search.estimate import Estimator
from tutti.plan.search.fit_by_recompute import Smaller
from tutti.plan.search.kind import kind
from tutti.plan.search.leading import Leading
from tutti.plan.search.offload import Offload
from tutti.plan.search.pipelines import Pipelines
from tutti.plan.search.single_stage import NEAR, Flat
from tutti.plan.variant import PLAIN, Variant
from tutti.progress import Say, silent

BUDGET = 20.0  # nominal seconds of work (`plan.network.work`) that a search may do
LED = 0.95  # share of the budget for named plans, if memory is scarce or the step is large
PIPED = 0.8  # share of the budget after which smaller plans are tried
TRIES = 4  # attempts to make a plan fit
VARIED = 5  # capturing a step takes this many times the work of making it of one with other rows, or a variant
SAID = (*DECISIONS, "durations")

NEARLY = 1.03  # plans whose times are within this factor are about as fast


def check_mesh(mesh: Mesh | None, cluster: Cluster) -> None:
    """Raise ValueError if a mesh has another number of devices than the cluster."""
    if mesh and devices(mesh) != cluster.size:
        raise ValueError(f"the mesh {mesh_name(mesh)} has {devices(mesh)} devices, {cluster} has {cluster.size}")


class Judge(Protocol):
    """Predicts the cost of plans."""

    def __call__(self, graph: StepGraph, plan: Plan, cluster: Cluster) -> Prediction:
        """Predict the cost of a step under a plan."""
        ...

    def forward_seconds(self, graph: StepGraph, cluster: Cluster) -> Callable[[Call], float]:
        """A function that gives the seconds of any call of the forward pass, unsplit, on one device."""
        ...


class Search:
    """Searches for the best plan of a model on a cluster.

    graph_of: returns the step's graph of one microbatch, given the number of microbatches per update and a variant.
    batch: rows of the global batch. The number of microbatches must divide it.
    accumulate: microbatches per update; None searches for it.
    mesh: the mesh; None searches for it.
    pins: decisions that the plan must respect.
    budget: nominal seconds of work (`plan.network.work`).
    stop: whether the search must end, once it has a plan that fits or none can, whatever the budget.
    better: called with each plan that is the fastest so far that fits.
    error: share by which predicted memory may be off. Of plans about as fast, one that fits with it is preferred.

    Raises ValueError if the mesh does not have the cluster's number of devices.
    """

    def __init__(
        self,
        graph_of: Callable[[int, Variant], StepGraph],
        batch: int,
        cluster: Cluster,
        judge: Judge,
        *,
        pins: Iterable[Pin] = (),
        accumulate: int | None = 1,
        mesh: Mesh | None = None,
        budget: float = BUDGET,
        progress: Say = silent,
        stop: Callable[[], bool] = lambda: False,
        better: Callable[[Plan], None] = lambda plan: None,
        error: float = 0.0,
    ):
        check_mesh(mesh, cluster)
        self.graph_of, self.batch, self.cluster, self.judge = graph_of, batch, cluster, judge
        self.pins, self.accumulate, self.mesh, self.progress = tuple(pins), accumulate, mesh, progress
        self.stop, self.better, self.error = stop, better, error
        self.work, self.budget, self.deadline = WorkClock(), budget, budget
        self.pipes = Pipelines(self)
        self.memory = cluster.device.memory
        self.planners: dict[tuple[int, Variant], Planner] = {}
        self.candidates: list[Candidate | PipelineCandidate] = []
        self.plans: list[Plan] = []  # judged plans
        self.judged: set[int] = set()  # ids of judged candidates
        self.took: list[float] = []  # seconds of work by candidate
        self.fused = 1.0  # ratio of a judged plan's time to the sum of its operators and collectives
        self.beside = 0.0  # peak bytes of the last judged plan that its choices do not account for
        self.impossible: ValueError | None = None  # why the last impossible mesh has no plan
        self.leading: Leading | None = None
        self.led = False  # whether memory is scarce and a named plan fits
        self.proven = 0  # number of named plans, if none of them is estimated to fit
        self.left: int = 0  # meshes that were skipped because the budget was spent

    def best(self, top: int = 1) -> Plan:
        """The fastest plan that fits in memory, with its reasons. top: see `ranked`. Raises ValueError if none fits."""
        plans = self.ranked(top)
        if not self.fits(plans[0]):
            raise reasons.too_large(self, plans[0])
        best = plans[0].replace(reasons=reasons.why(self, plans))
        return best if best.name.startswith("auto-") else best.replace(name=f"auto-{best.name}")  # searched, not named

    def ranked(self, top: int = 1) -> list[Plan]:
        """All judged plans: those that fit by time, then the others by the memory that they lack. At least `top` plans
        are judged if there are that many and the budget allows it. Raises ValueError if no mesh has a plan."""
        if self.cluster.size > 1 and not self.mesh and not self.pins:
            self.lead()
        if not self.pipes.fixed_devices:
            Flat(self).search()
        if not self.settled:
            self.deadline = PIPED * self.budget
            self.pipes.whole()
            self.deadline = self.budget
        Smaller(self).search()
        Offload(self).search()
        Copies(self).search()
        if not self.settled:
            self.pipes.chunked()
        if not self.plans and self.impossible:
            raise self.impossible
        self.fill(top)
        return self.in_order()

    @property
    def settled(self) -> bool:
        """Whether named plans of a large step, pipelines among them, were searched and one fits. Other pipelines take
        long to find there, and gain little."""
        return self.led and self.leading is not None and self.leading.large

    def lead(self) -> None:
        """Search the named plans if memory is scarce or the step is large. If none fits, judge the smallest, as
        evidence."""
        self.leading = Leading(self)
        if self.leading.needed:
            self.deadline = LED * self.budget
            self.leading.search()
            self.deadline = self.budget
            self.led = self.fastest is not None
            if not self.led:
                self.leading.judge_leanest()
                self.proven = len(self.leading.entries)

    def planner(self, count: int, variant: Variant = PLAIN) -> Planner:
        """The planner for a number of microbatches and a variant of the step."""
        if (count, variant) not in self.planners:
            step = self.graph_of(count, variant)
            if self.planners:  # made from the captured step, which the budget does not count
                self.work.capture(len(step.graph.nodes) // VARIED)
            self.planners[count, variant] = Planner(step, self.cluster, self.pins, count, variant, self.work)
        return self.planners[count, variant]

    @cached_property
    def estimator(self) -> Estimator:
        """Closed-form estimates of named plans, for any number of microbatches."""
        count = self.accumulate or 1
        return Estimator(self.planner(count), self.cluster, self.batch // count)

    def candidate(self, planner: Planner, mesh: Mesh, among: int = 1) -> Candidate:
        """The candidate of a mesh. among: number of meshes left. Each may use twice its share of the remaining work."""
        begin = self.work.seconds
        result = planner.on(mesh, max(1.0, (self.deadline - begin) * min(1.0, 2 / among)))
        self.took.append(self.work.seconds - begin)
        return result

    def consider(self, candidates: Sequence[Candidate | PipelineCandidate]) -> None:
        """Judge the candidates that may beat the best plan that fits."""
        self.beside = 0.0
        for candidate in sorted(candidates, key=lambda c: c.bound):
            if (self.late and self.plans) or self.slower(candidate.bound):
                break
            self.fit(candidate)

    def fit(self, candidate: Candidate | PipelineCandidate, slow: bool = False) -> Plan | None:
        """Judge the fastest plan of a candidate, then smaller ones until one fits; returns the last. Returns None if
        the plan would be slower than the best that fits, unless `slow` is set."""
        chosen, plan = candidate.chosen, None
        if (self.beside or self.led) and chosen.memory + self.beside > self.memory:
            chosen = candidate.within(self.memory - self.beside, self.deadline)
            if chosen.memory + self.beside > self.memory and not slow and self.fastest is not None:
                return None  # the candidate has no smaller plan
        for _ in range(TRIES):
            if not slow and self.slower(chosen.seconds):
                break
            if not self.affords(candidate.planner.accumulate, candidate.planner.variant):
                break
            self.judged.add(id(candidate))
            plan = self.judgement(candidate.plan(chosen))
            self.fused = min(self.fused, plan.predicted.step_seconds / chosen.seconds)
            if not self.fits(plan) and plan.accumulate > 1 and self.affords(plan.accumulate, plan.variant):
                plan = self.judgement(candidate.plan(chosen, gathered=True))
            self.beside = plan.predicted.peak_bytes - chosen.memory
            if self.fits(plan) or self.late:
                break
            smaller = candidate.within(self.memory - self.beside, self.deadline)
            if smaller.memory >= chosen.memory:
                break
            chosen = smaller
        if plan and not self.fits(plan) and self.fastest is None:
            plan = self.judgement(candidate.plan(candidate.smallest(), gathered=candidate.planner.accumulate > 1))
        return plan

    def affords(self, count: int, variant: Variant = PLAIN, share: float = 1.0) -> bool:
        """Whether the budget allows judging another plan. If no plan fits yet, true until the budget is spent.

        share: fraction of the step's nodes that are in unequal parts of it.
        """
        if self.fastest is None:
            return not self.late or not self.plans
        planner = next(iter(self.planners.values()))  # other numbers of microbatches give about as many nodes
        cost = WorkClock()
        cost.simulate(len(planner.step.graph.nodes), share)
        if (count, variant) not in self.planners:
            cost.capture(len(planner.step.graph.nodes) // VARIED)
        return self.work.seconds + cost.seconds <= self.deadline and not self.stop()

    def slower(self, cost: float) -> bool:
        """Whether a plan whose operators and collectives sum to `cost` seconds is slower than the best that fits."""
        return self.fastest is not None and self.fused * cost > NEAR * self.fastest

    def judgement(self, plan: Plan) -> Plan:
        """The plan with its prediction, which is also stored. A plan equal to a known one is not judged twice."""
        for judged in self.plans:
            if all(getattr(judged, what) == getattr(plan, what) for what in SAID):
                return judged
        self.progress(f"simulating {plan.name}, {counted(plan.accumulate, 'microbatch', 'microbatches')}")
        planner = self.planner(plan.accumulate, plan.variant)
        step, nodes = planner.step, len(planner.step.graph.nodes)
        if plan.stages:
            self.work.cut(nodes)
        self.work.simulate(nodes, planner.layers.unequal(plan.stages) if plan.stages else 1.0)
        before, prediction = self.fastest, self.judge(step, plan, self.cluster)
        self.plans.append(plan.replace(prediction=prediction))
        if self.fits(self.plans[-1]) and (before is None or prediction.step_seconds < before):
            self.better(self.plans[-1])
        return self.plans[-1]

    def fill(self, top: int) -> None:
        """Judge more plans, one of another kind than the best first, until `top` plans are judged. Once a plan fits,
        candidates that cannot fit are left out."""
        if top > 1 and self.leading and self.fastest is not None:
            best = kind(self.best_of_all)
            if not any(self.fits(plan) and kind(plan) != best for plan in self.plans):
                self.leading.another(best)
        others = [c for c in self.candidates if id(c) not in self.judged]
        for candidate in sorted(others, key=lambda c: c.bound):
            if len(self.plans) >= top or not self.affords(candidate.planner.accumulate, candidate.planner.variant):
                return
            if self.fastest is not None and candidate.chosen.memory > self.memory:
                continue
            self.judged.add(id(candidate))
            self.judgement(candidate.plan())

    @property
    def late(self) -> bool:
        return self.work.seconds > self.deadline or ((self.fastest is not None or self.hopeless) and self.stop())

    @property
    def hopeless(self) -> bool:
        """Whether no named plan is estimated to fit even with all that is stored outside of the devices."""
        room = self.memory + self.cluster.device.outside.memory
        return self.proven > 0 and min((p.predicted.peak_bytes for p in self.plans if not p.tiers), default=0) > room

    @property
    def fastest(self) -> float | None:
        """Seconds of the best plan that fits; None if none fits."""
        return min((p.predicted.step_seconds for p in self.plans if self.fits(p)), default=None)

    def fits(self, plan: Plan) -> bool:
        prediction, outside = plan.predicted, self.cluster.device.outside
        return prediction.peak_bytes <= self.memory and sum(prediction.bytes_by_tier.values()) <= outside.memory

    @property
    def best_of_all(self) -> Plan:
        return min(self.plans, key=self.rank)

    def lacking(self, plan: Plan) -> float:
        """Bytes by which a plan exceeds the memory of a device and what is outside of it."""
        prediction, outside = plan.predicted, self.cluster.device.outside
        return max(0, prediction.peak_bytes - self.memory) + max(
            0, sum(prediction.bytes_by_tier.values()) - outside.memory
        )

    def tight(self, plan: Plan) -> bool:
        """Whether the plan fits, but would not if its memory were underestimated by the error."""
        return self.fits(plan) and plan.predicted.peak_bytes * (1 + self.error) > self.memory

    def in_order(self) -> list[Plan]:
        """All judged plans by rank. First is the fastest that fits, or one that is about as fast and not tight."""
        plans = sorted(self.plans, key=self.rank)
        if plans and self.tight(plans[0]):
            limit = NEARLY * plans[0].predicted.step_seconds
            roomy = [p for p in plans if self.fits(p) and not self.tight(p) and p.predicted.step_seconds <= limit]
            plans.sort(key=lambda p: p is not roomy[0] if roomy else False)
        return plans

    def rank(self, plan: Plan) -> tuple[bool, float]:
        fits = self.fits(plan)
        return not fits, plan.predicted.step_seconds if fits else self.lacking(plan)
