"""`tutti plan --sweep h100:1x8..64x8`: the best plan for each size of a cluster, as a table and as curves."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from tutti.cli.plan.answer import Bill, bill, check_amounts, few, fitting
from tutti.cli.plan.stopwatch import Stopwatch
from tutti.cli.plan.workload import Captured, StepWork, Workload
from tutti.cli.tables import consoles, table, unbroken
from tutti.hardware import Cluster
from tutti.hardware.altered import altered
from tutti.launch.progress import Narrator, narrated
from tutti.plan.explain import figure, seconds, size
from tutti.plan.plan import Plan
from tutti.plan.search.reasons import TooLarge
from tutti.plan.search.search import BUDGET, Search
from tutti.progress import Say
from tutti.sim.error_bars import MEMORY, error_bar
from tutti.sim.picture import check_suffix, drawing
from tutti.sim.planning import Simulator

MOST = 64  # clusters of a range


@dataclass(frozen=True)
class Point:
    """The best plan for a cluster and a length of sequences, or why there is none and which cluster has one."""

    cluster: Cluster
    seq: int
    work: StepWork
    plan: Plan | None = None
    fits: str = "no"
    why: str = ""
    enough: str = ""
    price: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens a second, 0 without a plan."""
        return self.work.amount / self.plan.predicted.step_seconds if self.plan else 0.0

    def bill(self, tokens: float) -> Bill:
        return bill(self.rate, self.cluster, tokens, self.price)


def plan_sweep(
    clusters: tyro.conf.Positional[str],
    workload: Annotated[Workload, tyro.conf.arg(name="")],
    seqs: tuple[int, ...] = (),
    tokens: float = 0.0,
    price: tuple[float, ...] = (),
    what_if: str = "",
    level: str = "O2",
    budget: float = 30.0,
    picture: Path | None = None,
    save: Path | None = None,
) -> None:
    """The best plan for each size of a cluster, at the same global batch: tokens a second, memory, hours and cost.

    Args:
        clusters: A range, h100:1x8..64x8, in which one number doubles; or names with commas between them, which may be
            of different devices: h100:8x8,h200:8x8.
        seqs: Lengths of sequences, instead of --seq. The global batch stays.
        tokens: Also print how long training on so many tokens takes: 1e12.
        price: Price of a device hour: also print what these tokens cost. One for all, or one for each name or range.
        what_if: Other figures of the clusters, as for `tutti plan`.
        level: O0 runs operator by operator, O1 compiles groups of operators, O2 whole layers.
        budget: Seconds for each plan.
        picture: Draw the curves into this .svg, .png or .pdf.
        save: Write the points into this JSON file.
    """
    if picture:
        check_suffix(picture)
    check_amounts(budget, tokens, *price)
    targets = priced(clusters.split(","), price, what_if)
    console, progress = consoles()
    points: list[Point] = []
    with narrated(progress, "reading the model") as tell:
        for seq in seqs or (workload.seq,):
            captured = Captured(replace(workload, seq=seq), tell)
            points += best_of_each(captured, targets, level, budget, tell)
    console.print(_table(points, tokens), crop=False)
    if points[0].work.note:
        console.print(points[0].work.note, markup=False, soft_wrap=True)
    for note in [note for point in reversed(points) if tokens for note in few(point.work, point.cluster)][:1]:
        console.print(note, markup=False, soft_wrap=True)
    for point in points:
        if point.why:
            console.print(f"{point.cluster}, sequences of {point.seq}: {point.why}", markup=False, soft_wrap=True)
    if picture:
        draw(points, tokens, picture)
        console.print(f"saved {picture}")
    if save:
        save.write_text(json.dumps([_record(point, tokens) for point in points], indent=1) + "\n")
        console.print(f"saved {save}")


def priced(parts: Sequence[str], prices: Sequence[float], what_if: str = "") -> list[tuple[Cluster, float]]:
    """The clusters of names and ranges, each with its price of a device hour.

    Raises ValueError unless there is one price, one for each part, or none.
    """
    if len(prices) not in (0, 1, len(parts)):
        raise ValueError(f"{len(prices)} prices for {', '.join(parts)}: give one for all, or one for each")
    each = [*prices] * len(parts) if len(prices) == 1 else [*prices] or [0.0] * len(parts)
    return [
        (altered(Cluster.parse(name), what_if), price)
        for part, price in zip(parts, each, strict=True)
        for name in names_of(part.strip())
    ]


def names_of(clusters: str) -> list[str]:
    """A name, or the names of a range: h100:1x8..4x8 is h100:1x8, h100:2x8, h100:4x8.

    Raises ValueError for a range in which not exactly one number grows.
    """
    first, dots, last = clusters.partition("..")
    if not dots:
        return [first]
    device, _, counts = first.partition(":")
    begin, end = ([int(n) if n.isdigit() else 0 for n in re.split("x", text)] for text in (counts, last))
    grows = [k for k, (a, b) in enumerate(zip(begin, end, strict=False)) if a != b]
    if len(begin) != len(end) or 0 in (*begin, *end) or len(grows) != 1 or begin[grows[0]] > end[grows[0]]:
        raise ValueError(f"{clusters!r} is no range of clusters: write h100:1x8..64x8, in which one number grows")
    names: list[str] = []
    number = begin[grows[0]]
    while number <= end[grows[0]] and len(names) < MOST:
        names.append(f"{device}:" + "x".join(str(number if k == grows[0] else n) for k, n in enumerate(begin)))
        number *= 2
    return names


def best_of_each(
    captured: Captured, targets: Sequence[tuple[Cluster, float]], level: str, budget: float, tell: Narrator
) -> Iterator[Point]:
    """The best plan for each cluster and its price, told as it is found."""
    for target, price in targets:
        point = best_on(captured, target, level, budget, lambda what, on=target: tell(f"{on}: {what}"))
        tell.result(f"{target}, {point.seq} tokens: {_brief(point)}")
        yield replace(point, price=price)


def best_on(captured: Captured, target: Cluster, level: str, budget: float, tell: Say) -> Point:
    """The best plan that is found in so many seconds."""
    seq, work = captured.workload.seq, captured.facts.work
    try:
        search = Search(captured.graph, captured.facts.batch, target, Simulator(level), accumulate=None, budget=BUDGET,
                        progress=tell, stop=Stopwatch(budget).past, error=error_bar(MEMORY, target) or 0.0)  # fmt: skip
        best = search.best()
    except ValueError as error:  # nothing fits, or the batch does not divide
        return Point(target, seq, work, why=str(error), enough=error.enough if isinstance(error, TooLarge) else "")
    return Point(target, seq, work, best, fitting(search, best))


def _brief(point: Point) -> str:
    if point.plan is None:
        return "no plan"
    prediction = point.plan.predicted
    return f"{point.plan.name}, {seconds(prediction.step_seconds)} a step, {figure(point.rate)} {point.work.unit}/s"


def _table(points: list[Point], tokens: float) -> Any:
    unit = points[0].work.unit
    bills = [point.bill(tokens) if point.plan and tokens else None for point in points]
    money: dict[str, Callable[[Bill], str]] = {f"hours for {tokens:.3g}": lambda x: figure(x.hours)}
    money |= {"cost": lambda x: figure(x.cost)} if any(x and x.cost for x in bills) else {}
    money |= {"MWh at most": lambda x: x.mwh} if any(x and x.energy for x in bills) else {}
    money = money if tokens else {}
    seqs = len({point.seq for point in points}) > 1
    titles = ["plan", "step", f"{unit}/s", "a device", "scaling", "of peak", "memory", "fits", *money]
    shown = table("cluster", *(["seq"] if seqs else []), *titles, left=("plan",))
    first = {point.seq: point for point in reversed(points) if point.plan}
    for point, its in zip(points, bills, strict=True):
        start = [str(point.cluster), *([str(point.seq)] if seqs else [])]
        if point.plan is None:
            shown.add_row(*start, f"needs about {point.enough}" if point.enough else "-", *["-"] * 6, "no",
                          *["-"] * len(money))  # fmt: skip
            continue
        prediction, devices, base = point.plan.predicted, point.cluster.size, first[point.seq]
        each = point.rate / devices
        shown.add_row(
            *start, point.plan.name, seconds(prediction.step_seconds), figure(point.rate), figure(each),
            f"{100 * each / (base.rate / base.cluster.size):.0f} %", f"{100 * prediction.fraction_of_peak:.1f} %",
            size(prediction.peak_bytes), point.fits, *(cell(its) for cell in money.values() if its),
        )  # fmt: skip
    unbroken(shown)
    return shown


def _record(point: Point, tokens: float) -> dict[str, Any]:
    plan = json.loads(point.plan.to_json()) if point.plan else None
    bill = asdict(point.bill(tokens)) if plan and tokens else None
    return {"cluster": str(point.cluster), "devices": point.cluster.size, "seq": point.seq, "fits": point.fits,
            f"{point.work.unit} per second": point.rate, "bill": bill, "why": point.why, "enough": point.enough,
            "plan": plan}  # fmt: skip


def draw(points: list[Point], tokens: float, path: Path) -> None:
    """Throughput with its ideal, throughput of a device (or the cost), and memory, over the number of devices."""
    unit, costs = points[0].work.unit, bool(tokens and all(point.price for point in points))
    with drawing(path, 10, 3.2) as figure:
        panels, sizes = figure.subplots(1, 3), sorted({point.cluster.size for point in points})
        for seq in dict.fromkeys(point.seq for point in points):
            some = [point for point in points if point.seq == seq and point.plan]
            if not some:
                continue
            devices = [point.cluster.size for point in some]
            (line,) = panels[0].plot(devices, [point.rate for point in some], marker="o", label=f"{seq} tokens")
            ideal = [some[0].rate / devices[0] * n for n in devices]
            panels[0].plot(devices, ideal, color=line.get_color(), linewidth=0.8, linestyle=":")
            second = [p.bill(tokens).cost if costs else p.rate / p.cluster.size for p in some]
            panels[1].plot(devices, second, marker="o")
            panels[2].plot(devices, [p.plan.predicted.peak_bytes / 2**30 for p in some if p.plan], marker="o")
        panels[2].axhline(points[0].cluster.device.memory / 2**30, color="#222222", linewidth=0.8, linestyle="--")
        panels[0].set_yscale("log")
        second = f"cost of {tokens:.3g} {unit}" if costs else f"{unit} a second and device"
        titles = (f"{unit} a second; dotted: ideal", second, "memory, GiB; dashed: of a device")
        for axes, title in zip(panels, titles, strict=True):
            axes.set_xscale("log", base=2)
            axes.set_xticks(sizes, [f"{n:,}" for n in sizes])
            axes.minorticks_off()
            axes.set_title(title, loc="left", fontsize=9)
            axes.set_xlabel("devices")
        panels[1].set_ylim(bottom=0)
        panels[2].set_ylim(bottom=0)
        if len({point.seq for point in points}) > 1:
            panels[0].legend(frameon=False, fontsize=8)
