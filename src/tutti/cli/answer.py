"""What plans mean in tokens, hours and money, as lines and as a table with a line for each plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from tutti.cli.tables import table, unbroken
from tutti.plan.explain import seconds, size
from tutti.plan.plan import Plan
from tutti.plan.search import Search

# What a narrow terminal goes without.
LESS = ("sent", "hidden", "computing", "waiting", "microbatches", "of peak")


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


def ranking(search: Search, plans: Sequence[Plan], work: Work, console: Console) -> Table:
    """A table of plans, one line each. Columns that the console has no room for are left out."""
    rows = []
    for p in plans:
        prediction = p.predicted
        rate = work.amount / prediction.step_seconds / search.cluster.size
        rows.append({
            "plan": p.name, "step": seconds(prediction.step_seconds), f"{work.unit}/s/device": f"{rate:,.0f}",
            "of peak": f"{100 * prediction.fraction_of_peak:.1f} %", "computing": seconds(prediction.compute_seconds),
            "waiting": seconds(prediction.communication_seconds), "hidden": seconds(prediction.hidden_seconds),
            "sent": size(prediction.communication_bytes), "microbatches": str(p.accumulate),
            "memory": size(prediction.peak_bytes),
            "fits": fitting(search, p),
        })  # fmt: skip
    titles = list(rows[0])
    for left_out in (None, *LESS):
        titles = [title for title in titles if title != left_out]
        shown = table(*titles)
        for row in rows:
            shown.add_row(*(row[title] for title in titles))
        if unbroken(shown) <= console.width:
            break
    return shown


def throughput(plan: Plan, devices: int, work: Work, amount: float = 0.0, price: float = 0.0) -> list[str]:
    """Lines: how fast a plan is; how long an amount of work takes, and what it costs at a price of a device hour."""
    step = plan.predicted.step_seconds
    rate = work.amount / step
    lines = [
        f"throughput       {rate:,.0f} {work.unit}/s, {rate / devices:,.0f} a device; {3600 / step:,.0f} steps an hour"
    ]
    if amount:
        hours = amount / rate / 3600
        cost = f", {hours * devices * price:,.0f} at {price:g} a device hour" if price else ""
        took = f"{hours:,.1f} hours" if hours < 100 else f"{hours / 24:,.1f} days"
        lines.append(
            f"{amount:.3g} {work.unit:<10} {took} on {devices:,} devices: {hours * devices:,.0f} device hours{cost}"
        )
    return lines
