"""What plans mean in tokens, hours, money and energy, as lines and as a table with a line for each plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from rich.console import Console
from rich.table import Table

from tutti.cli.tables import table, unbroken
from tutti.hardware import Cluster
from tutti.plan.explain import seconds, size
from tutti.plan.plan import Plan
from tutti.plan.search import Search

# What a narrow terminal goes without.
LESS = ("sent", "hidden", "computing", "waiting", "microbatches", "of peak")
FEW = 2048  # tokens of a step for each device: with fewer, the batch is likely what limits throughput


@dataclass(frozen=True)
class Work:
    """What a step is done on. amount: of a step. unit: "tokens" or "rows"."""

    amount: int
    unit: str

    @classmethod
    def of(cls, example: Any, batch: int) -> Work:
        """Tokens of a batch that has `input_ids`, else its rows."""
        ids = example.get("input_ids") if isinstance(example, Mapping) else None
        return cls(ids.numel(), "tokens") if ids is not None else cls(batch, "rows")


def fitting(search: Search, plan: Plan) -> str:
    """ "yes", "tight" if it fits only without the error of predicted memory, or "no"."""
    return "no" if not search.fits(plan) else "tight" if search.tight(plan) else "yes"


def cells(search: Search, plan: Plan, work: Work) -> dict[str, str]:
    """The line of a plan in a ranking, by title of the column."""
    prediction = plan.predicted
    rate = work.amount / prediction.step_seconds / search.cluster.size
    return {
        "plan": plan.name, "step": seconds(prediction.step_seconds), f"{work.unit}/s/device": f"{rate:,.0f}",
        "of peak": f"{100 * prediction.fraction_of_peak:.1f} %", "computing": seconds(prediction.compute_seconds),
        "waiting": seconds(prediction.communication_seconds), "hidden": seconds(prediction.hidden_seconds),
        "sent": size(prediction.communication_bytes), "microbatches": str(plan.accumulate),
        "memory": size(prediction.peak_bytes), "fits": fitting(search, plan),
    }  # fmt: skip


def ranking(search: Search, plans: Sequence[Plan], work: Work, console: Console) -> Table:
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
        return f"{self.hours:,.1f} hours" if self.hours < 100 else f"{self.hours / 24:,.1f} days"

    @property
    def mwh(self) -> str:
        return f"{self.energy:,.0f}" if self.energy >= 100 else f"{self.energy:.3g}"


def bill(rate: float, cluster: Cluster, amount: float, price: float = 0.0) -> Bill:
    """What an amount takes at so much a second."""
    hours = amount / rate / 3600
    device_hours = hours * cluster.size
    return Bill(hours, device_hours, device_hours * price, device_hours * cluster.device.power / 1e6)


def check_amounts(budget: float, tokens: float, *prices: float) -> None:
    """Raise ValueError for a budget, an amount of work or prices that make no sense."""
    if not (budget > 0 and all(0 <= x < inf for x in (tokens, *prices))):
        shown = ", ".join(f"--price {price:g}" for price in prices)
        raise ValueError(f"--budget {budget:g}, --tokens {tokens:g}{shown and f', {shown}'}: above 0, and not negative")
    if any(prices) and not tokens:
        raise ValueError("--price says what --tokens cost: add them, for instance --tokens 1e12")


def throughput(plan: Plan, cluster: Cluster, work: Work, amount: float = 0.0, price: float = 0.0) -> list[str]:
    """Lines: how fast a plan is; how long an amount of work takes, what it costs at a price of a device hour, and the
    energy of the devices."""
    step, devices = plan.predicted.step_seconds, cluster.size
    rate = work.amount / step
    lines = [
        f"throughput       {rate:,.0f} {work.unit}/s, {rate / devices:,.0f} a device; {3600 / step:,.0f} steps an hour"
    ]
    if amount:
        took = bill(rate, cluster, amount, price)
        cost = f", {took.cost:,.0f} at {price:g} a device hour" if price else ""
        lines.append(
            f"{amount:.3g} {work.unit:<10} {took.time} on {devices:,} devices: {took.device_hours:,.0f} device "
            f"hours{cost}"
        )
        if took.energy:
            lines.append(f"energy           at most {took.mwh} MWh: the devices alone, at their rated "
                         f"{cluster.device.power:,.0f} W")  # fmt: skip
        lines += few(work, cluster)
    return lines


def few(work: Work, cluster: Cluster) -> list[str]:
    """A line if a step has few tokens for so many devices: then their cost says little of a long run."""
    if work.unit != "tokens" or work.amount >= FEW * cluster.size:
        return []
    return [
        f"note             a step has {work.amount:,} tokens, few for {cluster.size:,} devices, which sets these "
        "figures: give the batch of your run, such as --batch 512 --seq 8192"
    ]
