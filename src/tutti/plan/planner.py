"""Plans for one graph on one cluster: by name, for given layouts of inputs, or the cheapest on a mesh.

On a mesh, one problem decides all operators and axes together (`plan.network.sharding_problem`) and bounds how much
better another choice could be. A price on memory, raised until the plan fits, limits the memory (`Candidate.within`).
`plan.search.search` selects the meshes and predicts the actual cost of plans.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import cache, partial
from math import gcd
from types import MappingProxyType

from tutti.hardware import Cluster
from tutti.ir.kind import CALL_INPUTS, Kind, kind_of, path_of
from tutti.ir.step_graph import BACKWARD, FORWARD, UPDATE, StepGraph
from tutti.ops import source
from tutti.plan.explain import seconds
from tutti.plan.layouts.choice import Choice, layouts
from tutti.plan.layouts.experts import node_size
from tutti.plan.layouts.layout import Layout, Mesh, devices
from tutti.plan.layouts.pin import Pin, resolve
from tutti.plan.layouts.price import Pricer
from tutti.plan.layouts.problem import problem_of, striped
from tutti.plan.layouts.roles import Free, Roles, UndividedBatch, balances, sequences
from tutti.plan.network.sharding_problem import ShardingProblem, Solution
from tutti.plan.network.work import WorkClock
from tutti.plan.pipeline.candidate import PipelineCandidate, joined
from tutti.plan.pipeline.cuts import Layers
from tutti.plan.pipeline.schedule import NO_PIPE, PAIRED, Pipe
from tutti.plan.pipeline.slots import in_flight
from tutti.plan.plan import PIPELINE, Plan, inner_of, renamed
from tutti.plan.textbook import Textbook, parse_name, textbook_of
from tutti.plan.tier import offloaded
from tutti.plan.title import title
from tutti.plan.variant import PLAIN, Variant

RAISES = 5  # number of times to raise the price of memory, by a factor of four
HALVINGS = 4  # bisection steps between the last price that did not fit and the first that did
NOWHERE: Mapping[str, int] = MappingProxyType({})
CLOSE, ROUGH = 1e-4, 1e-3  # relative gaps that are accepted, without and with a price on memory


class Planner:
    """Makes plans for a step.

    pins: decisions that every plan must respect.
    accumulate: microbatches per update. `step` is the graph of one microbatch.
    variant: the variant of the step.
    work: the clock that counts the planner's work.
    """

    def __init__(self, step: StepGraph, cluster: Cluster, pins: Iterable[Pin] = (), accumulate: int = 1,
                 variant: Variant = PLAIN, work: WorkClock | None = None):  # fmt: skip
        self.work = work or WorkClock()
        self.step, self.cluster, self.accumulate, self.variant = step, cluster, accumulate, variant
        self._layers = cache(partial(Layers, step))
        self.whole = True  # False for a stage of a pipeline
        self.hides = False  # whether its pipeline hides exchanges of tokens (`plan.pipeline.schedule`)
        self.in_flight = 1.0  # microbatches whose activations a device keeps at once, in units of the model's
        self.problem = problem_of(step)
        if self.problem.without_rule and cluster.size > 1:
            names = ", ".join(self.problem.without_rule)
            warnings.warn(f"no rule says how to split {names}: every device computes them in full", stacklevel=4)
        self.pins = resolve(pins, step)

    def named(self, name: str) -> Plan:
        """The textbook plan with this name, which the plan keeps (`zero3`, not `dp8xzero3`). See `plan.textbook`.

        Raises ValueError if the name is unknown, or if the plan needs another variant of the step.
        """
        book = parse_name(name, self.cluster.size)
        if book.pipe.sequence_chunks != self.step.sequence_chunks:
            raise ValueError(
                f"plan {name!r} needs a step with {book.pipe.sequence_chunks} chunks of the sequence, not "
                f"{self.step.sequence_chunks} (tutti.lower.variants.unroll makes one)"
            )
        if book.batch_splits != self.step.batch_splits:
            raise ValueError(f"plan {name!r} needs a step with {book.batch_splits} copies of the batch, not "
                             f"{self.step.batch_splits} (tutti.lower.variants.vary makes one)")  # fmt: skip
        if book.recompute and self.variant.recompute != book.variant.recompute:
            raise ValueError(f"plan {name!r} needs a step that recomputes layers (tutti.lower.variants.vary makes one)")
        if book.recompute and not any("recompute" in node.meta for node in self.step.calls):
            raise ValueError(f"plan {name!r} recomputes numbered layers, and the model has none")
        without_effect = "zero" in name and not book.zero  # on a single data-parallel device
        candidate = self.piped(book) if book.pipe.devices > 1 else self.textbook(book)
        plan = candidate.plan(gathered=book.zero >= 2)
        tiers = offloaded(self.step, book.offload, self.cluster.device.outer) if book.offload else {}
        return plan.replace(name=str(book) if without_effect else name, tiers=tiers, overlap_chunks=book.overlap_chunks,
                            sum_dtype=book.sum_dtype, matmul_dtype=book.matmul_dtype, reround=book.reround)  # fmt: skip

    def textbook(self, book: Textbook, stored: Mapping[str, Layout] | None = None, stripes: bool = True) -> Candidate:
        """The cheapest choices that the textbook plan allows.

        stripes: whether `cp` splits the sequences of causal attention into stripes, else into contiguous parts.
        stored: fixed layouts of inputs, by label, for example those of the parameters during evaluation.
        """
        self._check_pins(book.mesh)
        planner, stripes = self, stripes and book.cp > 1 and balances(self.problem, book.cp)
        if stripes:
            planner = copy(self)
            planner.problem = striped(self.problem, sequences(self.problem), book.cp)
        allowed = Roles(planner.problem, book, self.pins, stored or {}, self.accumulate, stripes)
        return Candidate(planner, book.mesh, allowed, name=str(book))

    def piped(self, book: Textbook) -> PipelineCandidate:
        """The textbook plan as a pipeline; each of its devices runs the rest of the plan."""
        return PipelineCandidate(self.inside(book.pipe).textbook(replace(book, pipe=NO_PIPE)), book.pipe, self.cluster)

    def inside(self, pipe: Pipe) -> Planner:
        """The planner for one pipeline device."""
        inner = copy(self)
        inner.cluster = self.cluster.of(self.cluster.size // pipe.devices)
        inner.whole, inner.hides = False, pipe.schedule == PAIRED
        inner.in_flight = max(map(sum, in_flight(pipe.of(self.accumulate)))) / pipe.chunks
        return inner

    @property
    def layers(self) -> Layers:
        """The layers of the step, shared by this planner and all `inside` planners."""
        return self._layers()

    @property
    def runs(self) -> dict[str, int]:
        """Number of runs of each phase in a step. The update, which is not listed, runs once."""
        return {FORWARD: self.accumulate, BACKWARD: self.accumulate}

    def following(self, book: Textbook | None, mesh: Mesh, stored: Mapping[str, Layout],
                  homes: Mapping[str, int] = NOWHERE) -> Plan:  # fmt: skip
        """The plan for inputs that are placed already: as the textbook says, if its mesh is this one and divides the
        batch, else the cheapest.

        stored: layouts of inputs, by label. homes: stages of inputs of a pipeline, by name.
        """
        pipe, inner = Pipe(mesh.get(PIPELINE, 1)), inner_of(mesh)
        planner, candidate, gathered = self.inside(pipe) if PIPELINE in mesh else self, None, False
        if book and book.mesh == inner and book.pipe.devices == pipe.devices:
            with suppress(UndividedBatch):
                candidate, gathered = planner.textbook(replace(book, pipe=NO_PIPE), stored), book.zero >= 2
        candidate = candidate or Candidate(planner, inner, Free(self.problem, inner, {}, stored))
        plan = candidate.plan(gathered=gathered)
        plan = renamed(plan, dict(zip(plan.mesh, inner, strict=True)))
        if PIPELINE not in mesh:
            return plan
        stages = self.layers.around(homes, candidate.joint.costs(candidate.chosen), pipe.devices)
        return plan.replace(mesh=dict(mesh), stages=stages, cluster=str(self.cluster), name=joined(pipe, plan.name))

    def on(self, mesh: Mesh, seconds: float = 60.0, without: str = "") -> Candidate:
        """The cheapest choices on a mesh. without: a label whose pin is ignored. seconds: budget of work."""
        self._check_pins(mesh)
        pins = {label: axes for label, axes in self.pins.items() if label != without}
        return Candidate(self, mesh, Free(self.problem, mesh, pins, {}), seconds)

    def references(self) -> Iterator[Candidate]:
        """Textbook plans of a single axis, for comparison."""
        n = self.cluster.size
        books = {Textbook(n, 1, 0), Textbook(n, 1, 1), Textbook(n, 1, 3), Textbook(1, n, 0)} if n > 1 else ()
        for book in sorted(books, key=str):
            with suppress(ValueError):  # the batch does not divide, or a pin names another axis
                yield self.textbook(book)

    def undivided(self) -> tuple[str, ...]:
        """A note on the sizes of a data-parallel axis that do not divide the batch."""
        specs = [node.meta["val"] for name, node in self.step.inputs.items() if kind_of(name) == Kind.BATCH]
        n, batch = self.cluster.size, gcd(*(spec.shape[0] for spec in specs if spec.shape))
        sizes = [str(dp) for dp in range(2, n + 1) if n % dp == 0 and batch % dp]
        if not sizes:
            return ()
        what = "microbatch" if self.accumulate > 1 else "batch"
        return (
            f"a {what} of {batch} does not divide over {', '.join(sizes)} devices: axes of that size split it "
            f"unevenly or split another dim (a batch of {-(-batch // n) * n} would divide)",
        )

    def without_rule(self) -> tuple[str, ...]:
        """A note on the operators without a rule, which every device computes in full."""
        if not self.problem.without_rule or self.cluster.size == 1:
            return ()
        return (f"every device computes, because no rule splits them: {', '.join(self.problem.without_rule)}",)

    def _check_pins(self, mesh: Mesh) -> None:
        for label, axes in self.pins.items():
            for axis in axes:
                if axis not in mesh:
                    raise ValueError(f"the pin on {label!r} names axis {axis!r}; the mesh has {list(mesh)}")


class Candidate:
    """The plans of one mesh, from the fastest to the smallest. `chosen` is the fastest."""

    def __init__(self, planner: Planner, mesh: Mesh, allowed: Free, seconds: float = 60.0, name: str = ""):
        self.planner, self.mesh, self.name = planner, mesh, name
        deadline = planner.work.seconds + seconds
        pricer = Pricer(planner.cluster, mesh, planner.whole, planner.hides)
        self.joint = ShardingProblem(planner.problem, pricer, planner.runs, allowed, allowed.required,
                                     planner.in_flight, allowed.in_order)  # fmt: skip
        planner.work.price(sum(map(len, self.joint.network.unary.values())))
        self.only: dict[str, int] = {}  # fixed options, by label
        self.chosen = self.choose(0.0, deadline)

    @property
    def bound(self) -> float:
        """A lower bound of the modelled seconds of any plan on this mesh."""
        return self.chosen.bound

    def within(self, most: float, deadline: float) -> Solution:
        """The cheapest choices found that keep at most `most` bytes; the smallest found if none do."""
        price, low = self.par, 0.0
        smallest, fitting = self.chosen, None
        for _ in range(RAISES):
            chosen = self.choose(price, deadline)
            smallest = min(smallest, chosen, key=lambda c: c.memory)
            if chosen.memory <= most:
                fitting = chosen
                break
            if self.planner.work.seconds > deadline:
                break
            low, price = price, 4 * price
        for _ in range(HALVINGS):
            if fitting is None or self.planner.work.seconds > deadline:
                break
            between = (price * (low or price / 64)) ** 0.5
            chosen = self.choose(between, deadline)
            if chosen.memory <= most:
                fitting, price = chosen, between
            else:
                low = between
        return fitting or smallest

    @property
    def par(self) -> float:
        """The price of memory, in seconds per byte, at which memory costs as much as time."""
        return self.chosen.cost / self.chosen.memory

    def smallest(self) -> Solution:
        """The choices that keep the fewest bytes."""
        return self.choose(4**RAISES * self.par, self.planner.work.seconds + 60.0)

    def choose(self, price: float, deadline: float) -> Solution:
        """The cheapest choices at a price on memory, in seconds per byte."""
        work, close = self.planner.work, CLOSE if price == 0 else ROUGH
        return self.joint.choose(price, deadline - work.seconds, self.only, close, work)

    def layouts(self, label: str) -> list[Layout]:
        """The possible layouts of an input."""
        o = self.planner.problem.operators[label]
        return [layouts(o.rule, choices)[1][0] for choices in self.joint.options[label].choices]

    def where(self, label: str, layout: Layout, deadline: float) -> Candidate:
        """The candidate in which an input has this layout."""
        other = copy(self)
        other.only = {**self.only, label: self.layouts(label).index(layout)}
        other.chosen = other.choose(0.0, deadline)
        return other

    def plan(self, chosen: Solution | None = None, gathered: bool = False) -> Plan:
        """The plan of some choices, by default the fastest.

        gathered: accumulate gradients in the layout that the update reads, not in the one that the backward pass makes.
        """
        chosen, planner, inputs, operators = chosen or self.chosen, self.planner, {}, {}
        for label, choices in chosen.choices.items():
            o = planner.problem.operators[label]
            if choices and o.is_input:
                inputs[label] = layouts(o.rule, choices)[1][0]
            elif choices:
                operators[label] = dict(choices)
        if planner.accumulate > 1:
            inputs |= self._accumulators(chosen.choices, gathered)
        plan = Plan(self.mesh, inputs, operators, planner.accumulate, recompute=planner.variant.recompute,
                    batch_splits=planner.variant.batch_splits, name=self.name,
                    node_size=node_size(planner.problem, operators, self.mesh, planner.cluster),
                    graph=planner.step.fingerprint, cluster=str(planner.cluster),
                    reasons=(*planner.without_rule(), self._proof(chosen)))  # fmt: skip
        if not self.name:
            name = title(plan, planner.problem)
            alone = name.startswith("tp") and list(self.mesh) == ["dp"] and not planner.pins
            plan = (renamed(plan, {"dp": "tp"}) if alone else plan).replace(name=f"auto-{name}")
            if plan.batch_splits > 1:
                plan = plan.replace(name=f"{plan.name}xsplits{plan.batch_splits}")
        return plan

    def _proof(self, chosen: Solution) -> str:
        """What is proven about other choices."""
        if chosen.price:
            return f"made smaller: the cheapest on this mesh if a GiB of memory costs {seconds(2**30 * chosen.price)}"
        whose = f"that {self.name} leaves open" if self.name else "on this mesh"
        what = f"splits of operators and tensors {whose}"
        if chosen.gap < 1e-6:
            return f"proven for this mesh alone: no other {what} have a lower modelled cost"
        if chosen.gap <= CLOSE:
            return f"proven for this mesh alone: no other {what} have a modelled cost {100 * CLOSE:g} % lower"
        return f"the search ended early: other {what} could have a modelled cost {100 * chosen.gap:.2g} % lower"

    def _accumulators(self, taken: Mapping[str, Mapping[str, Choice]], gathered: bool) -> dict[str, Layout]:
        """The layouts of accumulated gradients: as the backward pass makes them, or as the update reads them."""
        accumulators, step, problem = {}, self.planner.step, self.planner.problem
        for name in step.gradient_names:
            maker, index = source(step.outputs[name])
            label = maker.meta["label"]
            layout = layouts(problem.operators[label].rule, taken[label])[1][index]
            if gathered:
                readers = [e for e in problem.edges if e.tensor == (label, index) and e.operand >= 0]
                updates = [e for e in readers if problem.operators[e.reader].phase == UPDATE]
                read = [layouts(problem.operators[e.reader].rule, taken[e.reader])[0][e.operand] for e in updates]
                layout = max(read, key=lambda at: len(at.splits), default=layout)
            accumulators[step.gradient_label(path_of(name))] = layout
        return {label: layout for label, layout in accumulators.items() if layout != Layout()}


def replan(step: StepGraph, plan: Plan, cluster: Cluster) -> Plan:
    """The plan for another graph of the model: another batch shape, evaluation, or other trained parameters.

    step: varied as `plan.variant`. Stored tensors keep their layouts, tiers and stages. If a textbook plan cannot split
    the batch, as with a smaller last batch, the operators are planned for the stored layouts instead.
    """
    name, inner = plan.name, plan.inner
    if plan.stages:
        name = "x".join(part for part in name.split("x") if not part.startswith(PIPELINE)) or "single"
        cluster = cluster.of(devices(inner))
    planner = Planner(step, cluster, accumulate=plan.accumulate)
    stored = {node.meta["label"] for node in step.inputs.values()}
    layouts_of = {label: plan.input_layout(label) for label in stored if kind_of(label) not in CALL_INPUTS}
    replanned = planner.following(textbook_of(name, inner), inner, layouts_of)
    labels = {node.meta["label"] for node in step.graph.nodes if "label" in node.meta}
    return replanned.replace(
        mesh=plan.mesh,
        stages=plan.stages,
        schedule=plan.schedule,
        sequence_chunks=plan.sequence_chunks,
        recompute=tuple(x for x in plan.recompute if "/" not in x or x in labels),
        sum_dtype=plan.sum_dtype,
        matmul_dtype=plan.matmul_dtype,
        reround=plan.reround,
        node_size=plan.node_size,
        tiers={label: tier for label, tier in plan.tiers.items() if label in labels},
        batch_splits=plan.batch_splits,
        overlap_chunks=plan.overlap_chunks,
        durations=plan.durations,
    )
