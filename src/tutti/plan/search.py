"""The search: over meshes and microbatches for the fastest plan that fits into memory.

What a mesh offers is known by what its choices cost (`plan.planner.Candidate`); what a plan really takes is for a
*judge* to say, who runs its Programs on a clock (`tutti.sim`). Candidates are judged by their bound: the least that
any plan on the mesh costs with memory for nothing. The first whose bound is no better than what was found ends the
search, and so does the time. A plan that is too large is made smaller by a price on memory, to what the judge says.

Microbatches never make a step faster, but smaller: more of them are tried while what fits is slower than what does not.
Then come pipelines (`plan.pipelines`), where what was found leaves them something to win; what would be faster than
all that fits, if it fitted, with less kept for the backward pass (`plan.smaller`); where nothing fits, what costs least
to keep outside of the device lies there (`plan.offload`); copies of the batch, or parts of the regions between
communications, where a device waits for others (`plan.copies`); and pipelines of parts of sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from tutti.hardware import Cluster
from tutti.ir.step_graph import Call, StepGraph
from tutti.plan import reasons
from tutti.plan.copies import Copies
from tutti.plan.explain import mesh_name
from tutti.plan.layout import Mesh, devices
from tutti.plan.leading import Leading
from tutti.plan.offload import Offload
from tutti.plan.pin import Pin
from tutti.plan.pipeline_candidate import PipelineCandidate
from tutti.plan.pipelines import Pipelines
from tutti.plan.plan import DECISIONS, Plan, Prediction
from tutti.plan.planner import Candidate, Planner
from tutti.plan.smaller import Smaller
from tutti.plan.textbook import Textbook
from tutti.plan.variant import PLAIN, Variant
from tutti.plan.work import Work

BUDGET = 60.0  # seconds of work (`plan.work`) that a search may do
LED = 0.95  # the share of it in which named plans are looked at, where they have to be small
FLAT, PIPED = 0.6, 0.8  # and after which pipelines are looked at, where there may be, and smaller plans
NEAR = 1.02  # costs and judgements agree within this
TRIES = 4  # to make a plan fit
DEEPER = 30  # times as long as with two axes it may take to look at a mesh of three
VARIED = 5  # times as long as to make a variant of a step it takes to capture it
SAID = (*DECISIONS, "durations")
SHRINKING = ("activations", "temporaries", "communication")  # kinds of memory that microbatches make less

Progress = Callable[[str], None]


class Judge(Protocol):
    """Who says what runs take."""

    def __call__(self, graph: StepGraph, plan: Plan, cluster: Cluster) -> Prediction:
        """Of a plan's step."""
        ...

    def forward_seconds(self, graph: StepGraph, cluster: Cluster) -> Callable[[Call], float]:
        """Of any one call of the forward pass, whole, on one device."""
        ...


class Search:
    """The search of a plan for a model on a cluster.

    graph_of: the step's graph of one of so many microbatches per update, in a variant.
    batch: sequences, images, ... of a global batch, which microbatches have to divide.
    accumulate, mesh, pins: what is given; None is searched.
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
        progress: Progress = lambda what: None,
    ):
        if mesh and devices(mesh) != cluster.size:
            raise ValueError(f"the mesh {mesh_name(mesh)} has {devices(mesh)} devices, {cluster} has {cluster.size}")
        self.graph_of, self.batch, self.cluster, self.judge = graph_of, batch, cluster, judge
        self.pins, self.accumulate, self.mesh, self.progress = tuple(pins), accumulate, mesh, progress
        self.work, self.budget, self.deadline = Work(), budget, budget
        self.pipes = Pipelines(self)
        self.memory = cluster.device.memory
        self.planners: dict[tuple[int, Variant], Planner] = {}
        self.candidates: list[Candidate | PipelineCandidate] = []
        self.plans: list[Plan] = []  # judged
        self.judged: set[int] = set()  # ids of candidates
        self.took: list[float] = []  # seconds of work by candidate
        self.fused = 1.0  # what judged plans take of what their operators and collectives cost one by one
        self.beside = 0.0  # bytes at the peak of the last judged plan beside what its choices keep
        self.impossible: ValueError | None = None  # why the last mesh offers nothing that did not
        self.leading: Leading | None = None
        self.led = False  # whether a named plan is known that fits, where few do
        self.proven = 0  # named plans that are all estimated not to fit
        self.left: int = 0  # meshes that were not looked at for want of time

    def best(self, top: int = 1) -> Plan:
        """The fastest plan that fits in memory, with the reasons. top: see `ranked`."""
        plans = self.ranked(top)
        if not self.fits(plans[0]):
            raise ValueError(reasons.too_large(self, plans[0]))
        best = plans[0].replace(reasons=reasons.why(self, plans))
        return best if best.name.startswith("auto-") else best.replace(name=f"auto-{best.name}")  # was not asked for

    def ranked(self, top: int = 1) -> list[Plan]:
        """The plans that were judged, at least `top` of them where there are: those that fit by time, then the others
        by memory."""
        if self.cluster.size > 1 and not self.mesh and not self.pins:
            self.lead()
        if not self.pipes.given:
            self.flat()
        self.deadline = PIPED * self.budget
        self.pipes.whole()
        self.deadline = self.budget
        Smaller(self).search()
        Offload(self).search()
        Copies(self).search()
        self.pipes.chunked()
        if not self.plans and self.impossible:
            raise self.impossible
        self.fill(top)
        return sorted(self.plans, key=self.rank)

    def lead(self) -> None:
        """Search the named plans, where few of all plans can fit; where none does, judge the leanest, for the proof."""
        self.leading = Leading(self)
        if self.leading.needed:
            self.deadline = LED * self.budget
            self.leading.search()
            self.deadline = self.budget
            self.led = self.fastest is not None
            if not self.led:
                self.leading.judge_leanest()
                self.proven = len(self.leading.entries)

    def flat(self) -> None:
        """Search without pipelines."""
        if self.pipes.possible:
            self.deadline = FLAT * self.budget
        count = self.accumulate or (1 if self.fastest is None else self.best_of_all.accumulate)
        while count and not (self.late and self.fastest is not None):
            found = list(self.look(self.planner(count)))
            self.candidates += found
            if not self.candidates and self.impossible:
                raise self.impossible
            self.consider(found)
            count = self.more(count, found)
        if self.fastest is not None:
            self.deeper()

    def planner(self, count: int, variant: Variant = PLAIN) -> Planner:
        """For so many microbatches, and a variant of the step."""
        if (count, variant) not in self.planners:
            step = self.graph_of(count, variant)
            again = any(known == count for known, _ in self.planners)  # a variant of what was captured already
            self.work.capture(len(step.graph.nodes) // (VARIED if again else 1))
            self.planners[count, variant] = Planner(step, self.cluster, self.pins, count, variant, self.work)
        return self.planners[count, variant]

    def look(self, planner: Planner) -> Iterator[Candidate]:
        """The candidates of all meshes of one or two axes, or of the one that is given, and what the textbook says."""
        many = f" with {planner.accumulate} microbatches" if planner.accumulate > 1 else ""
        meshes = self.meshes(planner)
        if self.plans:  # first what was best with fewer microbatches
            meshes.sort(key=lambda mesh: list(mesh.items()) != list(self.best_of_all.mesh.items()))
        for i, mesh in enumerate(meshes):
            if self.late and (i or self.fastest is not None):
                self.left += len(meshes) - i
                return
            self.progress(f"mesh {mesh_name(mesh)}{many} ({i + 1} of {len(meshes)})")
            try:
                yield self.candidate(planner, mesh, len(meshes) - i)
            except ValueError as error:  # a pin that this mesh cannot hold
                self.impossible = error
        if not self.mesh and not self.late:
            self.progress("what the textbook says")
            yield from planner.references()

    def deeper(self) -> None:
        """Look at meshes of three axes, the whole nodes or two halves as one, while there is time."""
        n, node = self.cluster.size, self.cluster.levels[0][0]
        planner = self.planner(self.best_of_all.accumulate)
        outer = n // node if node < n else 2
        if n % outer or planner.pins or self.mesh:
            return
        for k in range(2, n // outer):
            if (n // outer) % k or self.work.seconds + DEEPER * max(self.took, default=0.0) > self.deadline:
                continue
            mesh = {"dp": outer, "cp": n // outer // k, "tp": k}
            self.progress(f"mesh {mesh_name(mesh)}")
            candidate = self.candidate(planner, mesh)
            self.candidates.append(candidate)
            self.consider([candidate])

    def candidate(self, planner: Planner, mesh: Mesh, among: int = 1) -> Candidate:
        """What a mesh offers. among: meshes still to be looked at: each may take twice its share of the time."""
        begin = self.work.seconds
        found = planner.on(mesh, max(1.0, (self.deadline - begin) * min(1.0, 2 / among)))
        self.took.append(self.work.seconds - begin)
        return found

    def meshes(self, planner: Planner) -> list[Mesh]:
        """Every mesh of one or two axes, the outer one first, with the pinned axes; or the one that is given."""
        if self.mesh:
            return [self.mesh]
        n = self.cluster.size
        found: list[Mesh] = [Textbook(n // k, k).mesh for k in range(1, n + 1) if n % k == 0]
        if n > 1 and not planner.pins:
            found.pop()  # a single axis by another name
        pinned = {axis for axes in planner.pins.values() for axis in axes}
        kept = [mesh for mesh in found if pinned <= set(mesh)]
        if not kept:
            raise ValueError(
                f"no mesh of {n} devices has all the axes that pins name, {sorted(pinned)}; there are 'dp' and 'tp', "
                "or those of the mesh that you give"
            )
        return kept

    def consider(self, candidates: Sequence[Candidate | PipelineCandidate]) -> None:
        """Judge those that may be better than the best that fits."""
        self.beside = 0.0
        for candidate in sorted(candidates, key=lambda c: c.bound):
            if (self.late and self.plans) or self.slower(candidate.bound):
                break
            self.fit(candidate)

    def fit(self, candidate: Candidate | PipelineCandidate, slow: bool = False) -> Plan | None:
        """Judge the fastest plan of a candidate, and smaller ones until one fits: the last. Nothing where it would be
        slower than the best that fits, unless `slow` ones are wanted."""
        chosen, plan = candidate.chosen, None
        if (self.beside or self.led) and chosen.kept + self.beside > self.memory:
            chosen = candidate.within(self.memory - self.beside, self.deadline)
            if chosen.kept + self.beside > self.memory and not slow and self.fastest is not None:
                return None  # as small as it gets
        for _ in range(TRIES):
            if not slow and self.slower(chosen.seconds):
                break
            if not self.affords(candidate.planner.accumulate, candidate.planner.variant):
                break
            self.judged.add(id(candidate))
            plan = self.judgement(candidate.plan(chosen))
            self.fused = min(self.fused, plan.predicted.step_seconds / chosen.seconds)
            if not self.fits(plan) and plan.accumulate > 1:
                plan = self.judgement(candidate.plan(chosen, gathered=True))
            self.beside = plan.predicted.peak_bytes - chosen.kept
            if self.fits(plan) or self.late:
                break
            smaller = candidate.within(self.memory - self.beside, self.deadline)
            if smaller.kept >= chosen.kept:
                break
            chosen = smaller
        if plan and not self.fits(plan) and self.fastest is None:
            plan = self.judgement(candidate.plan(candidate.smallest(), gathered=candidate.planner.accumulate > 1))
        return plan

    def affords(self, count: int, variant: Variant = PLAIN) -> bool:
        """Whether a plan can be judged in time; if none that fits is known, it is in any case."""
        if self.fastest is None:
            return not self.late or not self.plans
        known = next(iter(self.planners.values()))  # steps of other numbers of microbatches have about as many nodes
        cost = Work()
        cost.simulate(len(known.step.graph.nodes))
        if all(count != other for other, _ in self.planners):
            cost.capture(len(known.step.graph.nodes))
        return self.work.seconds + cost.seconds <= self.deadline

    def slower(self, cost: float) -> bool:
        """Whether what costs so many seconds, operator by operator, is slower than the best that fits."""
        return self.fastest is not None and self.fused * cost > NEAR * self.fastest

    def judgement(self, plan: Plan) -> Plan:
        """The plan with its prediction, kept. One that says the same as another is not judged again."""
        for known in self.plans:
            if all(getattr(known, what) == getattr(plan, what) for what in SAID):
                return known
        self.progress(f"simulating {plan.name}")
        step = self.planner(plan.accumulate, plan.variant).step
        self.work.simulate(len(step.graph.nodes))
        made = self.judge(step, plan, self.cluster)
        self.plans.append(plan.replace(prediction=made))
        return self.plans[-1]

    def more(self, count: int, candidates: Sequence[Candidate]) -> int:
        """The next number of microbatches to try; 0 to end."""
        least, fastest = min((c.bound for c in candidates), default=0.0), self.fastest
        if self.accumulate is not None or (self.late and fastest is not None):
            return 0
        smallest = min((p for p in self.plans if p.accumulate == count), key=self.rank, default=None)
        if smallest is None or (fastest and fastest <= NEAR * self.fused * least):
            return 0
        over = smallest.predicted.peak_bytes - self.memory
        shrinks = sum(smallest.predicted.bytes_by_kind.get(kind, 0) for kind in SHRINKING)
        if over >= shrinks:
            return 0
        wanted = max(2.0, shrinks / (shrinks - over)) * count
        more = [n for n in range(count + 1, self.batch + 1) if self.batch % n == 0]
        return next((n for n in more if n >= wanted), more[-1] if more else 0)

    def fill(self, top: int) -> None:
        """Judge more candidates until there are so many plans."""
        others = [c for c in self.candidates if id(c) not in self.judged]
        for candidate in sorted(others, key=lambda c: c.bound):
            if len(self.plans) >= top or self.late:
                return
            self.judged.add(id(candidate))
            self.judgement(candidate.plan())

    @property
    def late(self) -> bool:
        return self.work.seconds > self.deadline

    @property
    def fastest(self) -> float | None:
        """Seconds of the best that fits."""
        return min((p.predicted.step_seconds for p in self.plans if self.fits(p)), default=None)

    def fits(self, plan: Plan) -> bool:
        made, outside = plan.predicted, self.cluster.device.outside
        return made.peak_bytes <= self.memory and sum(made.bytes_by_tier.values()) <= outside.memory

    @property
    def best_of_all(self) -> Plan:
        return min(self.plans, key=self.rank)

    def rank(self, plan: Plan) -> tuple[bool, float]:
        made, fits = plan.predicted, self.fits(plan)
        return not fits, made.step_seconds if fits else made.peak_bytes
