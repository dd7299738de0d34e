"""The planner: the fastest plan that fits, over every mesh of the devices.

On each mesh all operators and all axes are decided together (`plan.joint`), with a proof of how much better another
choice could be. Where the result does not fit in memory, a price on memory is raised until it does. Meshes are tried
by what they would cost with memory for nothing, which no fitting plan can beat: the first that is no longer better
than what was found ends the search.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from math import gcd, prod

from tutti.cluster import Cluster
from tutti.graph.step_graph import BACKWARD, FORWARD, UPDATE, StepGraph
from tutti.plan.choice import Choice, layouts
from tutti.plan.estimate import Estimator
from tutti.plan.explain import seconds, size
from tutti.plan.joint import Chosen, Joint
from tutti.plan.layout import Layout, Mesh
from tutti.plan.pin import Pin, resolve
from tutti.plan.plan import Plan, renamed
from tutti.plan.price import Pricer
from tutti.plan.problem import problem_of
from tutti.plan.roles import Free, Roles
from tutti.plan.textbook import Textbook, parse_name, textbook_of
from tutti.plan.title import title
from tutti.rules import source

BUDGET = 60.0  # seconds that a search may take
RAISES = 12  # of the price of memory, fourfold each
HALVINGS = 4  # between the last that did not fit and the first that did
Progress = Callable[[int, int], None]


class Planner:
    """Plans for one graph on one cluster."""

    def __init__(self, step: StepGraph, cluster: Cluster, pins: Iterable[Pin] = (), accumulate: int = 1):
        self.step, self.cluster, self.accumulate = step, cluster, accumulate
        self.problem = problem_of(step)
        if self.problem.without_rule and cluster.size > 1:
            names = ", ".join(self.problem.without_rule)
            warnings.warn(f"no rule says how to split {names}: computed whole on every device", stacklevel=4)
        self.pins = resolve(pins, step)
        self.estimator = Estimator(step, self.problem, cluster, accumulate)

    def named(self, name: str) -> Plan:
        """A textbook plan by its name, which it keeps (`zero3`, not `dp8xzero3`). See `plan.textbook`."""
        book = parse_name(name, self.cluster.size)
        without_effect = "zero" in name and not book.zero  # on a single data-parallel device
        return self.textbook(book).replace(name=str(book) if without_effect else name)

    def textbook(self, book: Textbook, stored: Mapping[str, Layout] | None = None) -> Plan:
        """The textbook plan with the cheapest choices.

        stored: layouts of inputs that are given already, by label (to evaluate with the parameters as they lie).
        """
        self._check_pins(book.mesh)
        joint = self._joint(book.mesh, Roles(self.problem, book, self.pins, stored or {}))
        return self._plan(book.mesh, joint.choose(), str(book), gathered=book.zero >= 2)

    def held(self, mesh: Mesh, stored: Mapping[str, Layout]) -> Plan:
        """The cheapest plan whose inputs lie as they are stored."""
        joint = self._joint(mesh, Free(self.problem, mesh, {}, stored))
        return self._plan(mesh, joint.choose())

    def best(self, ranked: list[Plan] | None = None) -> Plan:
        """The fastest plan that fits in memory, with the reasons. ranked: what `ranked` found, where known."""
        plans = ranked or self.ranked()
        memory = self.cluster.device.memory
        fitting = [p for p in plans if p.predicted.peak_bytes <= memory]
        if not fitting:
            least = plans[0]
            raise ValueError(
                f"no plan fits into {size(memory)} per device on {self.cluster}: the smallest, {least.name}, "
                f"needs {size(least.predicted.peak_bytes)}; use more devices or a smaller batch"
                + "".join(f"; {reason}" for reason in self._left_out())
            )
        return fitting[0].replace(reasons=_reasons(fitting, plans, memory) + self._left_out() + fitting[0].reasons)

    def ranked(self, progress: Progress = lambda done, total: None, budget: float = BUDGET) -> list[Plan]:
        """The plans that were found: those that fit in memory by time, then the others by memory.

        progress: told how many of how many meshes are done. budget: seconds after which the best so far is taken.
        """
        deadline = time.monotonic() + budget
        memory, plans = self.cluster.device.memory, []
        meshes = self._meshes()
        free: list[tuple[float, Joint, Plan]] = []
        for i, mesh in enumerate(meshes):
            progress(i, len(meshes))
            if free and time.monotonic() > deadline:
                break
            joint = self._joint(mesh, Free(self.problem, mesh, self.pins, {}))
            chosen = joint.choose(seconds=deadline - time.monotonic())
            free.append((chosen.bound, joint, self._plan(mesh, chosen)))
        plans = [plan for *_, plan in free] + self._references()
        fastest = min((p.predicted.step_seconds for p in plans if p.predicted.peak_bytes <= memory), default=None)
        for bound, joint, plan in sorted(free, key=lambda item: item[0]):
            if fastest is not None and bound >= fastest:
                break
            if plan.predicted.peak_bytes > memory and time.monotonic() < deadline:
                plans += self._fitted(joint, plan, deadline)
                fitting = [p.predicted.step_seconds for p in plans if p.predicted.peak_bytes <= memory]
                fastest = min(fitting, default=None)
        progress(len(meshes), len(meshes))

        def rank(plan: Plan) -> tuple[bool, float]:
            made, too_large = plan.predicted, plan.predicted.peak_bytes > memory
            return too_large, made.peak_bytes if too_large else made.step_seconds

        return sorted(plans, key=rank)

    def _references(self) -> list[Plan]:
        """What the textbook says for a single axis, to compare with."""
        n = self.cluster.size
        books = {Textbook(n, 1, 0), Textbook(n, 1, 1), Textbook(n, 1, 3), Textbook(1, n, 0)} if n > 1 else ()
        found = []
        for book in sorted(books, key=str):
            with suppress(ValueError):  # where the batch does not divide, or a pin names another axis
                found.append(self.textbook(book))
        return found

    def _fitted(self, joint: Joint, free: Plan, deadline: float) -> list[Plan]:
        """The fastest found on a mesh that fits, at a price on memory; the smallest found where none does."""
        memory, made = self.cluster.device.memory, free.predicted
        price, low, smallest = made.step_seconds / made.peak_bytes / 64, 0.0, free
        found: Plan | None = None

        def at(price: float) -> Plan:
            return self._plan(free.mesh, joint.choose(price, deadline - time.monotonic()))

        for _ in range(RAISES):
            plan = at(price)
            smallest = min(smallest, plan, key=lambda p: p.predicted.peak_bytes)
            if plan.predicted.peak_bytes <= memory:
                found = plan
                break
            if time.monotonic() > deadline:
                break
            low, price = price, 4 * price
        for _ in range(HALVINGS):
            if found is None:
                break
            between = (low * price) ** 0.5 if low else price / 2
            plan = at(between)
            if plan.predicted.peak_bytes <= memory:
                found, price = plan if plan.predicted.step_seconds < found.predicted.step_seconds else found, between
            else:
                low = between
        return [found] if found else [smallest] if smallest is not free else []

    def _meshes(self) -> list[Mesh]:
        """Every mesh of one or two axes, the outer one first, with the pinned axes."""
        n = self.cluster.size
        meshes: list[Mesh] = [Textbook(n // tp, tp).mesh for tp in range(1, n + 1) if n % tp == 0]
        pinned = {axis for axes in self.pins.values() for axis in axes}
        kept = [mesh for mesh in meshes if pinned <= set(mesh)]
        if len(kept) > 1 and not pinned:
            kept.pop()  # a single axis by another name
        if not kept:
            raise ValueError(
                f"no mesh of {n} devices has all the axes that pins name, {sorted(pinned)}; there are 'dp' and 'tp'"
            )
        return kept

    def _left_out(self) -> tuple[str, ...]:
        """Which numbers of data-parallel devices the batch does not divide over."""
        specs = [node.meta["val"] for name, node in self.step.inputs.items() if name.startswith("batch:")]
        n, batch = self.cluster.size, gcd(*(spec.shape[0] for spec in specs if spec.shape))
        sizes = [str(dp) for dp in range(2, n + 1) if n % dp == 0 and batch % dp]
        if not sizes:
            return ()
        what = "microbatch" if self.accumulate > 1 else "batch"
        return (
            f"left out dp {', '.join(sizes)}: a {what} of {batch} does not divide over so many devices, "
            f"one of {-(-batch // n) * n} would",
        )

    def _check_pins(self, mesh: Mesh) -> None:
        for label, axes in self.pins.items():
            for axis in axes:
                if axis not in mesh:
                    raise ValueError(f"the pin on {label!r} names axis {axis!r}; the mesh has {list(mesh)}")

    def _joint(self, mesh: Mesh, allowed: Free) -> Joint:
        runs = {FORWARD: self.accumulate, BACKWARD: self.accumulate}
        return Joint(self.problem, Pricer(self.cluster, mesh), runs, allowed, allowed.given)

    def _plan(self, mesh: Mesh, chosen: Chosen, name: str = "", gathered: bool = False) -> Plan:
        """gathered: whether microbatches' gradients are accumulated as the update reads them."""
        inputs, operators = {}, {}
        for label, choices in chosen.choices.items():
            o = self.problem.operators[label]
            if choices and o.is_input:
                inputs[label] = layouts(o.rule, choices)[1][0]
            elif choices:
                operators[label] = dict(choices)
        if self.accumulate > 1:
            inputs |= self._accumulators(chosen.choices, gathered)
        plan = Plan(mesh, inputs, operators, self.accumulate, name, self.step.fingerprint, str(self.cluster))
        if not name:
            found = title(plan, self.problem)
            alone = found.startswith("tp") and list(mesh) == ["dp"] and not self.pins
            plan = (renamed(plan, {"dp": "tp"}) if alone else plan).replace(name=f"auto-{found}")
        return plan.replace(prediction=self.estimator.predict(plan), reasons=(*self._without_rule(), _proof(chosen)))

    def _without_rule(self) -> tuple[str, ...]:
        """Which operators run whole on every device because no rule says how to split them."""
        if not self.problem.without_rule or self.cluster.size == 1:
            return ()
        return (f"computed whole on every device, for want of a rule: {', '.join(self.problem.without_rule)}",)

    def _accumulators(self, taken: Mapping[str, Mapping[str, Choice]], gathered: bool) -> dict[str, Layout]:
        """How gradients lie between microbatches: as they are made, or as the update reads them."""
        found = {}
        for name in self.step.gradient_names:
            maker, index = source(self.step.outputs[name])
            label = maker.meta["label"]
            layout = layouts(self.problem.operators[label].rule, taken[label])[1][index]
            if gathered:
                readers = [e for e in self.problem.edges if e.tensor == (label, index) and e.operand >= 0]
                updates = [e for e in readers if self.problem.operators[e.reader].phase == UPDATE]
                read = [layouts(self.problem.operators[e.reader].rule, taken[e.reader])[0][e.operand] for e in updates]
                layout = max(read, key=lambda at: len(at.splits), default=layout)
            found[self.step.gradient_label(name.removeprefix("grad:"))] = layout
        return {label: layout for label, layout in found.items() if layout != Layout()}


def _proof(chosen: Chosen) -> str:
    """What is known about the choices that were not taken."""
    if chosen.gap < 1e-6:
        return "proven: no other choices on this mesh cost less"
    return f"the search was ended early: other choices on this mesh could cost {100 * chosen.gap:.2g} % less"


def _reasons(ranked: list[Plan], plans: list[Plan], memory: float) -> tuple[str, ...]:
    """Why the first of the ranked plans, in words."""

    def line(p: Plan) -> str:
        made = p.predicted
        return (
            f"{p.name}: {seconds(made.step_seconds)} a step ({seconds(made.communication_seconds)} communication), "
            f"peak {size(made.peak_bytes)} per device"
        )

    reasons = [f"chosen {line(ranked[0])}: the fastest of {len(plans)} plans that fits"]
    if not ranked[0].operators and prod(ranked[0].mesh.values()) > 1:
        reasons.append("every device computes everything: to split it would cost more communication than it saves")
    if len(ranked) > 1:
        slower = ranked[1].predicted.step_seconds / ranked[0].predicted.step_seconds
        reasons.append(f"runner-up {line(ranked[1])}: {slower:.2f} times as slow")
    for p in plans:
        if p.predicted.peak_bytes > memory:
            reasons.append(f"rejected {line(p)}: more than the {size(memory)} of a device")
    return tuple(reasons)


def replan(step: StepGraph, plan: Plan, cluster: Cluster) -> Plan:
    """The plan for another graph of the same model (another batch shape, evaluation): inputs lie as they do."""
    planner = Planner(step, cluster, accumulate=plan.accumulate)
    book = textbook_of(plan.name, plan.mesh)
    labels = {node.meta["label"] for node in step.inputs.values()}
    stored = {
        label: plan.input_layout(label) for label in labels if label.split(":")[0] not in ("batch", "seed", "step")
    }
    return planner.textbook(book, stored) if book else planner.held(plan.mesh, stored)
