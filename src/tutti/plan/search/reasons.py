"""Reasons in words: why a plan was chosen, how others compare, and what would help if no plan fits."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from tutti.hardware import Cluster
from tutti.plan.explain import counted, mesh_name, seconds, size
from tutti.plan.plan import Plan
from tutti.plan.planner import Planner
from tutti.plan.search.leading import CAUTION, Leading

if TYPE_CHECKING:
    from tutti.plan.search.search import Search

DOUBLINGS = 13  # maximum number of doublings of the devices when looking for a cluster that suffices
TRYING = 30.0  # nominal seconds of work for that
KINDS = 4  # number of kinds of memory in the message
REJECTED = 2  # number of plans that do not fit in the reasons


def why(search: Search, plans: list[Plan]) -> tuple[str, ...]:
    """The reasons for the first of the ranked plans."""
    best, *others = plans
    fitting = sum(map(search.fits, plans))
    of = f" of {fitting} that fit, of {counted(len(plans), 'plan')} that were simulated"
    fastest = min((p for p in plans if search.fits(p)), key=search.rank, default=best)
    lines = [f"chosen {_line(best)}: the fastest{of}" if others else f"chosen {_line(best)}"]
    if fastest is not best:
        lines = [f"chosen {_line(best)}: about as fast as the fastest{of}, which has less memory to spare than "
                f"predictions are off: {_line(fastest)}"]  # fmt: skip
    if not best.operators and prod(best.inner.values()) > 1:
        lines.append("every device computes everything: splitting would cost more communication than it saves")
    slower = [p for p in others if search.fits(p)]
    if slower:
        lines.append(f"runner-up {_line(slower[0])}: {difference(best, slower[0])}")
    for p in sorted((p for p in others if not search.fits(p)), key=lambda p: p.predicted.step_seconds)[:REJECTED]:
        lines.append(f"rejected {_line(p)}: more than the {size(search.memory)} of a device")
    skipped = [c for c in search.candidates if id(c) not in search.judged]
    if skipped:
        nearest = min(skipped, key=lambda c: c.bound)
        least = seconds(search.fused * nearest.bound)
        lines.append(f"not simulated: {counted(len(skipped), 'candidate')} on other meshes or of another sort, with "
                       f"modelled steps of at least about {least} (mesh {mesh_name(nearest.mesh)})")  # fmt: skip
    if search.left:
        lines.append(f"skipped, because their share of the budget was spent: {counted(search.left, 'mesh', 'meshes')}; "
                     "a larger budget includes more")  # fmt: skip
    divided = () if best.stages else search.planner(best.accumulate).undivided()
    return (*lines, *divided, *best.reasons)


class TooLarge(ValueError):
    """No plan fits. enough: a cluster on which one does, "" if none was found."""

    def __init__(self, message: str, enough: str = ""):
        super().__init__(message)
        self.enough = enough


@dataclass(frozen=True)
class Enough:
    """A larger cluster, and a plan that fits there. bytes: bytes that a device needs, simulated or estimated."""

    cluster: Cluster
    plan: str
    bytes: float
    simulated: bool

    def __str__(self) -> str:
        needs = "needs" if self.simulated else "is estimated to need"
        return f"{self.cluster}: there {self.plan} {needs} {size(self.bytes)}"


def too_large(search: Search, smallest: Plan) -> TooLarge:
    """The error if no plan fits, with what would help."""
    prediction, device = smallest.predicted, search.cluster.device
    kinds = sorted(prediction.bytes_by_kind.items(), key=lambda item: -item[1])[:KINDS]
    which = "no plan that was found within the budget" if search.late and not search.proven else "no plan"
    there = sum(prediction.bytes_by_tier.values())
    beside = f" and {size(device.outside.memory)} of the {device.outer} for each" if there else ""
    said = (
        f"{which} fits into {size(search.memory)} per device{beside} on {search.cluster}: the smallest, "
        f"{smallest.name}, needs {size(prediction.peak_bytes)} ({', '.join(f'{kind} {size(n)}' for kind, n in kinds)})"
    )
    said += f" and {size(there)} of the {device.outer}" if there else ""
    if search.proven:
        said += f"; none of the {search.proven:,} named plans for {search.cluster} is estimated to need less"
    larger = enough(search)
    if larger:
        said += f"; it needs about {larger}"
    else:
        said += "; none of the larger numbers of devices that were tried suffices by itself"
    away = outside(search, smallest)
    if away:
        said += (f"; or state outside of the devices: --plan {away.name} --accumulate {away.accumulate} takes "
                 f"{seconds(away.predicted.step_seconds)} a step and {size(away.predicted.peak_bytes)}")  # fmt: skip
    if there > device.outside.memory:
        said += f"; or {size(there)} of the {device.outer} for each device (`beside` in a cluster's JSON file)"
    inside = min((p.predicted.peak_bytes for p in search.plans if not p.tiers), default=prediction.peak_bytes)
    if inside > search.memory:
        said += f"; or devices with {size(inside)} of memory"
    if search.accumulate is not None and search.accumulate < search.batch:
        said += f"; or more microbatches than {search.accumulate} per update, or a smaller batch"
    said = "; ".join((said, *search.planner(smallest.accumulate).undivided()))
    return TooLarge(said, str(larger.cluster) if larger else "")


def outside(search: Search, smallest: Plan) -> Plan | None:
    """A named plan with offloaded state that fits, and stores as little as possible outside; else None."""
    room = search.memory + search.cluster.device.outside.memory
    if "offload" in smallest.name or room < smallest.predicted.peak_bytes:
        return None
    planner = search.planner(smallest.accumulate, smallest.variant)
    for offload in ("offload", "offload2"):
        try:
            plan = planner.named(f"{smallest.name}x{offload}")
        except ValueError:  # no named plan, or one that cannot be combined with offloading
            return None
        search.progress(f"simulating {plan.name}")
        search.work.simulate(len(planner.step.graph.nodes))
        plan = plan.replace(prediction=search.judge(planner.step, plan, search.cluster))
        if search.fits(plan):
            return plan
    return None


def enough(search: Search) -> Enough | None:
    """The fewest devices of this kind on which a plan fits: doubled repeatedly, or 3/4 of that; else None. Named plans
    come first."""
    planner, size = search.planner(max(count for count, _ in search.planners)), search.cluster.size
    deadline = search.work.seconds + TRYING
    counts = {size << i for i in range(1, DOUBLINGS)} | {1 << i for i in range(DOUBLINGS) if 1 << i > size}
    state = sum(
        prod(spec.shape) * spec.dtype.itemsize for spec in (x.meta["val"] for x in planner.step.inputs.values())
    )
    for look in (named_on, on):
        for n in sorted(n for n in counts if n * search.memory >= state):
            larger = look(search, planner, n) if search.work.seconds < deadline else None
            if larger:
                fewer = 3 * n // 4
                return (look(search, planner, fewer) if fewer > size else None) or larger
    return None


def named_on(search: Search, planner: Planner, count: int) -> Enough | None:
    """A named plan that fits on this number of devices; None if there is none. It is simulated if there
    is time; else its estimate must leave room."""
    leading = search.leading
    if leading is None:
        return None
    try:
        there = Leading(search, search.cluster.of(count), leading.estimator)
        there.corrections = leading.corrections
        lean = there.advisable()
    except ValueError:  # this number of devices does not fill whole nodes
        return None
    if lean is None:
        return None
    many = f" --accumulate {lean.count}" if lean.count > 1 else ""
    estimate = Enough(lean.cluster, f"{lean.book}{many}", lean.bytes, False)
    if search.stop():
        return estimate if lean.bytes <= CAUTION * search.memory else None
    planner = search.planner(lean.count, lean.book.variant)
    try:
        plan = Planner(planner.step, lean.cluster, (), lean.count, planner.variant, search.work).named(str(lean.book))
        return _simulated(search, planner, lean.cluster, plan, estimate.plan)
    except ValueError:
        return None


def on(search: Search, planner: Planner, count: int) -> Enough | None:
    """A plan that fits on this number of devices; None if there is none."""
    try:
        cluster = search.cluster.of(count)
        inner = cluster.levels[0][0]
        mesh = {"dp": cluster.size // inner, "tp": inner} if inner < cluster.size else {"dp": cluster.size}
        candidate = Planner(planner.step, cluster, (), planner.accumulate, work=search.work).on(mesh)
    except ValueError:
        return None
    plan = candidate.plan(candidate.smallest())
    return _simulated(search, planner, cluster, plan, plan.name)


def _simulated(search: Search, planner: Planner, cluster: Cluster, plan: Plan, name: str) -> Enough | None:
    search.progress(f"simulating {name} on {cluster}")
    search.work.simulate(len(planner.step.graph.nodes))
    peak = search.judge(planner.step, plan, cluster).peak_bytes
    return Enough(cluster, name, peak, True) if peak <= search.memory else None


def difference(ours: Plan, other: Plan) -> str:
    """The difference of two simulations: how much more or less the other plan takes."""
    a, b = ours.predicted, other.predicted
    parts = {
        "computing": b.compute_seconds - a.compute_seconds,
        "communicating": b.communication_seconds - a.communication_seconds,
    }
    if a.bubble_seconds or b.bubble_seconds:
        parts["waiting for the pipeline"] = b.bubble_seconds - a.bubble_seconds
    said = ", ".join(f"{_signed(value)} {what}" for what, value in parts.items())
    memory = b.peak_bytes - a.peak_bytes
    return (
        f"{_signed(b.step_seconds - a.step_seconds)} a step ({said}), "
        f"{'-' if memory < 0 else '+'}{size(abs(memory))} of memory"
    )


def _signed(value: float) -> str:
    return f"{'-' if value < 0 else '+'}{seconds(abs(value))}"


def _line(p: Plan) -> str:
    prediction = p.predicted
    many = f" of {p.accumulate} microbatches" if p.accumulate > 1 else ""
    waiting = f"{seconds(prediction.communication_seconds)} waiting for communication"
    peak = f"peak {size(prediction.peak_bytes)} per device"
    return f"{p.name}: {seconds(prediction.step_seconds)} a step{many} ({waiting}), {peak}"
