"""`tutti plan --compare h100:8x8 h200:8x8 --model ...`: the best plan on each of two clusters, and why they differ.

The reasons are simulations: the plan of the first cluster on devices with the arithmetic of the second, then with its
memory bandwidth too, then with its links, and at last the second cluster's own plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated

import tyro
from rich.table import Table

from tutti.cli.plan.answer import check_amounts, few
from tutti.cli.plan.sweep import Point, best_of_each, priced
from tutti.cli.plan.workload import Captured, Workload
from tutti.cli.tables import consoles, table, unbroken
from tutti.hardware import Cluster
from tutti.launch.progress import narrated
from tutti.plan.explain import figure, seconds, size
from tutti.plan.plan import Plan
from tutti.sim.planning import Simulator

SAME = 0.005  # of a step: a change below it is none


def plan_compare(
    first: tyro.conf.Positional[str],
    second: tyro.conf.Positional[str],
    workload: Annotated[Workload, tyro.conf.arg(name="")],
    tokens: float = 0.0,
    price: tuple[float, ...] = (),
    what_if: str = "",
    level: str = "O2",
    budget: float = 30.0,
) -> None:
    """The best plan on each of two clusters, side by side, and where the difference comes from.

    With two saved plans in place of the clusters and no --model, prints how these differ and what that costs: lines
    with - are of the first, lines with + of the second.

    Args:
        first: A cluster: h100:8x8.
        second: The cluster to compare with: h200:8x8.
        tokens: Also print how long training on so many tokens takes: 1e12.
        price: Price of a device hour: also print what these tokens cost. One for both, or one for each.
        what_if: Other figures of both clusters, as for `tutti plan`.
        level: O0 runs operator by operator, O1 compiles groups of operators, O2 whole layers.
        budget: Seconds for each plan.
    """
    check_amounts(budget, tokens, *price)
    targets = priced([first, second], price, what_if)
    if len(targets) != 2:
        raise ValueError(f"--compare {first} {second}: two clusters, not ranges; for those there is --sweep")
    console, progress = consoles()
    with narrated(progress, "reading the model") as tell:
        captured = Captured(workload, tell)
        points = first_point, second_point = list(best_of_each(captured, targets, level, budget, tell))
        both = first_point.plan and second_point.plan
        lines = list(reasons(captured, first_point, second_point, level, tell)) if both else []
    console.print(side_by_side(points, tokens), crop=False)
    if lines and tokens and all(point.price for point in points):
        a, b = (point.bill(tokens).cost for point in points)
        lines.append(f"{tokens:.3g} {points[0].work.unit} cost {100 * abs(b / a - 1):.0f} % "
                     f"{'more' if b > a else 'less'} there")  # fmt: skip
    notes = [note for point in points if tokens for note in few(point.work, point.cluster)]
    notes = [point.work.note for point in points[:1] if point.work.note] + notes[:1]
    for line in [*lines, *notes, *(f"{point.cluster}: {point.why}" for point in points if point.why)]:
        console.print(line, markup=False, soft_wrap=True)


def side_by_side(points: list[Point], tokens: float) -> Table:
    """A column for each cluster, and one for the second over the first."""
    shown = table("", *(str(point.cluster) for point in points), "ratio")
    plans = [point.plan.predicted if point.plan else None for point in points]
    bills = [point.bill(tokens) if point.plan and tokens else None for point in points]

    def line(title: str, values: list[float | None], text) -> None:
        a, b = values
        if any(values):
            shown.add_row(title, *(text(x) if x else "-" for x in values), f"{b / a:.2f}" if a and b else "")

    shown.add_row("plan", *(point.plan.name if point.plan else "none fits" for point in points), "")
    line("microbatches", [p.plan and p.plan.accumulate for p in points], str)
    line("step", [p and p.step_seconds for p in plans], seconds)
    line("  computing", [p and p.compute_seconds for p in plans], seconds)
    line("  waiting for communication", [p and p.communication_seconds for p in plans], seconds)
    line("  waiting for the pipeline", [p and p.bubble_seconds for p in plans], seconds)
    unit = points[0].work.unit
    line(f"{unit}/s", [p.rate for p in points], figure)
    line(f"{unit}/s a device", [p.rate / p.cluster.size for p in points], figure)
    line("of peak", [p and p.fraction_of_peak for p in plans], lambda share: f"{100 * share:.1f} %")
    line("memory of a device", [p and p.peak_bytes for p in plans], size)
    line("  it has", [p.cluster.device.memory for p in points], size)
    shown.add_row("fits", *(p.fits for p in points), "")
    line(f"hours for {tokens:.3g} {unit}", [b and b.hours for b in bills], figure)
    line("device hours", [b and b.device_hours for b in bills], figure)
    line("cost", [b and b.cost for b in bills], figure)
    line("MWh at most", [b and b.energy for b in bills], figure)
    unbroken(shown)
    return shown


def reasons(captured: Captured, first: Point, second: Point, level: str, tell) -> Iterator[str]:
    """Where the difference of two clusters comes from, in lines."""
    a, b = first.plan, second.plan
    assert a and b
    more = second.rate / first.rate
    each = more * first.cluster.size / second.cluster.size
    yield (
        f"{second.cluster} is {more:.2f} times as fast as {first.cluster}"
        + (f", {each:.2f} times a device" if second.cluster.size != first.cluster.size else "")
    )
    graph, judge, before = captured.graph(a.accumulate, a.variant), Simulator(level), a.predicted.step_seconds
    for what, cluster in between(first.cluster, second.cluster):
        tell(f"{a.name} with {what} of {second.cluster.device.name}")
        after = judge(graph, a, cluster).step_seconds
        yield f"  its {what}: {seconds(before)} to {seconds(after)} a step, {_change(before, after)}"
        before = after
    after = b.predicted.step_seconds
    own = "its own plan"
    if second.cluster.size != first.cluster.size:
        own += f", on {second.cluster.size:,} devices rather than {first.cluster.size:,}"
    yield f"  {own}: {seconds(before)} to {seconds(after)} a step, {_change(before, after)}{_differs(a, b)}"


def between(first: Cluster, second: Cluster) -> Iterator[tuple[str, Cluster]]:
    """Clusters of the first one's size, with one kind of figure of the second after the other, and the kind's name.

    Memory keeps the size of the first: only another plan can use more. Nothing if the second's devices do not fill
    nodes at that size.
    """
    old, new = first.device, second.device
    try:
        linked = second if second.size == first.size else second.of(first.size)
    except ValueError:
        return
    shares = {name: share for name, share in new.efficiency.items() if name != "memory"}
    fixed = {"memory": old.memory, "bandwidth": old.bandwidth}
    slow = {"memory": old.efficiency["memory"]} if "memory" in old.efficiency else {}
    arithmetic = replace(new, **fixed, efficiency={**shares, **slow}, streams=old.streams)
    yield "arithmetic", replace(first, device=arithmetic)
    bandwidth = replace(new, memory=old.memory)
    yield "memory bandwidth", replace(first, device=bandwidth)
    yield "links", replace(linked, device=bandwidth)


def _change(before: float, after: float) -> str:
    change = before / after - 1
    return "no change" if abs(change) < SAME else f"{100 * change:+.0f} % speed"


def _differs(a: Plan, b: Plan) -> str:
    """What the second plan does otherwise, in words."""
    said = [f"{b.name} in place of {a.name}"] if a.name != b.name else []
    if a.accumulate != b.accumulate:
        said.append(f"{b.accumulate} instead of {a.accumulate} microbatches")
    if bool(a.recompute) != bool(b.recompute):
        said.append("recomputes activations" if b.recompute else "recomputes nothing")
    more = b.predicted.peak_bytes - a.predicted.peak_bytes
    if said and abs(more) > 2**30:
        said.append(f"{size(abs(more))} {'more' if more > 0 else 'less'} memory")
    return f" ({', '.join(said)})" if said else ""
