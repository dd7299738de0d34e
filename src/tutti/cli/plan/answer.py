"""What plans mean in tokens, hours, money and energy, as lines and as a table with a line for each plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from rich.console import Console
from rich.table import Table

from tutti.cli.plan.workload import StepWork
from tutti.cli.tables import table, unbroken
from tutti.hardware import Cluster
from tutti.plan.explain import counted, figure, seconds, size
from tutti.plan.plan import Plan
from tutti.plan.search.remedies import remedies
from tutti.plan.search.search import Search
from tutti.sim.error_bars import plus_minus

# What a narrow terminal goes without.
LESS = ("sent", "hidden", "computing", "waiting", "microbatches", "of peak")
FEW = 2048  # tokens of a step for each device: with fewer, the batch is likely what limits throughput


def fitting(search: Search, plan: Plan) -> str:
    """ "yes", "tight" if it fits only without the error of predicted memory, or "no"."""
    return "no" if not search.fits(plan) else "tight" if search.tight(plan) else "yes"


def cells(search: Search, plan: Plan, work: StepWork) -> dict[str, str]:
    """The line of a plan in a ranking, by title of the column."""
    prediction = plan.predicted
    rate = work.amount / prediction.step_seconds / search.cluster.size
    return {
        "plan": plan.name, "step": seconds(prediction.step_seconds), f"{work.unit}/s/device": figure(rate),
        "of peak": f"{100 * prediction.fraction_of_peak:.1f} %", "computing": seconds(prediction.compute_seconds),
        "waiting": seconds(prediction.communication_seconds), "hidden": seconds(prediction.hidden_seconds),
        "sent": size(prediction.communication_bytes), "microbatches": str(plan.accumulate),
        "memory": size(prediction.peak_bytes), "fits": fitting(search, plan),
    }  # fmt: skip


def ranking(search: Search, plans: Sequence[Plan], work: StepWork, console: Console) -> Table:
    """A table of plans, one line each. Columns that the console has no room for are left out."""
    rows = [cells(search, plan, work) for plan in plans]
    titles = list(rows[0])
    for left_out in (None, *LESS):
        titles = [title for title in titles if title != left_out]
        shown = table(*titles)
        for row in rows:
            shown.add_row(*(row[title] for title in titles))
        if unbroken(shown) <= console.width:
            break
    return shown


@dataclass(frozen=True)
class Bill:
    """What an amount of work takes on a cluster.

    cost: at a price of a device hour; 0 without one. energy: MWh of the devices at their rated power, without hosts,
    network and cooling; 0 if the power is unknown.
    """

    hours: float
    device_hours: float
    cost: float
    energy: float

    @property
    def time(self) -> str:
        return f"{figure(self.hours)} hours" if self.hours < 100 else f"{figure(self.hours / 24)} days"

    @property
    def mwh(self) -> str:
        return figure(self.energy)


def bill(rate: float, cluster: Cluster, amount: float, price: float = 0.0) -> Bill:
    """What an amount takes at so much a second."""
    hours = amount / rate / 3600
    device_hours = hours * cluster.size
    return Bill(hours, device_hours, device_hours * price, device_hours * cluster.device.power / 1e6)


def check_amounts(budget: float, tokens: float, *prices: float) -> None:
    """Raise ValueError for a budget, an amount of work or prices that make no sense."""
    if not budget > 0:
        raise ValueError(f"--budget {budget:g}: a number of seconds above 0")
    for option, value in (("tokens", tokens), *(("price", price) for price in prices)):
        if not 0 <= value < inf:
            raise ValueError(f"--{option} {value:g}: 0 or more, and finite")
    if any(prices) and not tokens:
        raise ValueError("--price says what --tokens cost: add them, for instance --tokens 1e12")


def summary(
    search: Search, plan: Plan, work: StepWork, off: float | None = None, amount: float = 0.0, price: float = 0.0
) -> list[str]:
    """The answer in lines: plan, whether it fits, time, throughput, share of the peak, memory and cost.

    off: the share that predicted times may be off.
    """
    prediction, cluster = plan.predicted, search.cluster
    many = counted(plan.accumulate, "microbatch", "microbatches")
    beside = (f"; {size(sum(prediction.bytes_by_tier.values()))} of the {size(cluster.device.outside.memory)} of the "
              f"{cluster.device.outer} for each") if prediction.bytes_by_tier else ""  # fmt: skip
    return [
        f"plan             {plan.name} on {cluster}, {many} per update",
        *_misfit(search, plan),
        f"time             {seconds(prediction.step_seconds)}{plus_minus(off)} a step",
        *throughput(plan, cluster, work),
        *([f"note             {work.note}"] if work.note else []),
        f"of peak (MFU)    {100 * prediction.fraction_of_peak:.3g} % of {peak(plan, cluster)}",
        f"memory           {size(prediction.peak_bytes)}{plus_minus(search.error)} of the {size(search.memory)} of a "
        f"device: {room(search, plan)}{beside}",
        *costs(plan, cluster, work, amount, price),
    ]


def _misfit(search: Search, plan: Plan) -> list[str]:
    if not search.fits(plan):
        lack = "device" if plan.predicted.peak_bytes > search.memory else search.cluster.device.outer
        return [f"does not fit     the {lack} has too little memory; {remedies(search, plan)}"]
    if search.tight(plan):
        return ["tight            less memory is free than predictions of memory are off"]
    return []


def room(search: Search, plan: Plan) -> str:
    """Memory of a device that is left, or that lacks, with its share."""
    left = search.memory - plan.predicted.peak_bytes
    return f"{size(abs(left))} ({100 * abs(left) / search.memory:.3g} %) {'free' if left >= 0 else 'too much'}"


def peak(plan: Plan, cluster: Cluster) -> str:
    """The peak that a share of the peak is of."""
    dtype = plan.predicted.peak_dtype
    low = f", to which its products in {plan.matmul_dtype.upper()} count too" if plan.matmul_dtype else ""
    return f"the {dtype} peak of {figure(cluster.device.peak[dtype] / 1e12)} TFLOP/s a device{low}"


def in_float32(dtype: str, cluster: Cluster, transformers: bool) -> list[str]:
    """A line if a model is in float32 and bfloat16 would be faster."""
    peaks = cluster.device.peak
    if dtype != "float32" or peaks.get("bfloat16", 0.0) <= peaks["float32"]:
        return []
    how = "--dtype bfloat16" if transformers else "model.to(torch.bfloat16)"
    rates = f"{figure(peaks['float32'] / 1e12)} and {figure(peaks['bfloat16'] / 1e12)} TFLOP/s"
    without = " without TF32, as PyTorch does by default" if "tfloat32" in peaks else ""
    return [f"note             the model is in float32, whose matrix products are predicted{without}; bfloat16 ({how}) "
            f"would be faster: the peaks are {rates}"]  # fmt: skip


def throughput(plan: Plan, cluster: Cluster, work: StepWork) -> list[str]:
    """A line: how fast a plan is."""
    step = plan.predicted.step_seconds
    rate = work.amount / step
    return [
        f"throughput       {figure(rate)} {work.unit}/s, {figure(rate / cluster.size)} a device; "
        f"{figure(3600 / step)} steps an hour"
    ]


def costs(plan: Plan, cluster: Cluster, work: StepWork, amount: float = 0.0, price: float = 0.0) -> list[str]:
    """Lines: how long an amount of work takes, what it costs at a price of a device hour, and the energy of the
    devices."""
    if not amount:
        return []
    took = bill(work.amount / plan.predicted.step_seconds, cluster, amount, price)
    cost = f", {figure(took.cost)} at {price:g} a device hour" if price else ""
    lines = [f"{f'{amount:.3g} {work.unit}':<16} {took.time} on {counted(cluster.size, 'device')}: "
             f"{figure(took.device_hours)} device hours{cost}"]  # fmt: skip
    if took.energy:
        lines.append(f"energy           at most {took.mwh} MWh: the devices alone, at their rated "
                     f"{cluster.device.power:,.0f} W")  # fmt: skip
    return lines + few(work, cluster)


def few(work: StepWork, cluster: Cluster) -> list[str]:
    """A line if a step has few tokens for so many devices: then their cost says little of a long run."""
    if work.unit != "tokens" or work.amount >= FEW * cluster.size:
        return []
    return [
        f"note             a step has {work.amount:,} tokens, few for {cluster.size:,} devices, which sets these "
        "figures: give the batch of your run, such as --batch 512 --seq 8192"
    ]
