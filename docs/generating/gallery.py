"""The gallery: benchmarks/results/gallery.json as a table of models and clusters, and the command of each cell."""

from __future__ import annotations

import re
from typing import Any

from generating.benchmarks import results
from generating.page import NOTE, table

Row = dict[str, Any]


def page() -> str:
    result = results()["gallery"]
    rows: list[Row] = result["rows"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    prices = {row["cluster"].partition(":")[0]: row["price"] for row in rows if "price" in row}
    shown = ", ".join(f"{price:g} for {device}" for device, price in prices.items())
    parts = [
        f"{NOTE}\n# Gallery\n\n{len(models)} well-known models, each planned for four clusters as `tutti plan` plans "
        "them in half a minute: the fastest plan that fits, predicted. The optimizer is AdamW in bfloat16 with float32 "
        "masters. [Published runs](published.md) say how far such predictions are off.\n\n"
        f"Costs follow from prices of a device hour, assumed in dollars: {shown}. A model that does not fit names the "
        "devices on which it does.\n\n"
        "`benchmarks/gallery.py` writes the results, one row at a time; `--sweep` and `--compare` of `tutti plan` "
        "([sizing a cluster](guide/sizing.md)) do the same for your models.\n\n## At a glance\n\n"
        "Throughput of a device, share of its peak, and the cost of a trillion tokens or a billion images.\n\n"
        + table(("model", *(f"`{cluster}`" for cluster in dict.fromkeys(row["cluster"] for row in rows))),
                (_line(model, [row for row in rows if row["model"] == model]) for model in models))
    ]  # fmt: skip
    for model in models:
        its = [row for row in rows if row["model"] == model]
        parts.append(f"\n## {model}\n\n{_about(its[0])}\n\n" + table(HEAD, map(_cells, its)) + _commands(its))
    parts.append(f"\nPlanned on {result['date'][:10]} with Tutti {result['versions']['tutti']}.\n")
    return "".join(parts)


HEAD = ("cluster", "plan", "step", "a device", "of peak", "memory", "device hours", "cost")


def _line(model: str, rows: list[Row]) -> tuple[str, ...]:
    """A model's line in the first table."""
    cells = [
        f"{row['per_second'] / row['devices']:,.0f}/s, {100 * row['fraction_of_peak']:.0f} %, {row['cost']:,.0f}"
        if "plan" in row else f"needs `{row['enough']}`" if row["enough"] else "does not fit" for row in rows
    ]  # fmt: skip
    return f"[{model}](#{anchor(model)})", *cells


def anchor(heading: str) -> str:
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).lower())


def _about(row: Row) -> str:
    unit = "images" if row["seq"] == 2 else f"sequences of {row['seq']:,} tokens"
    amount = "a billion images" if row["seq"] == 2 else "a trillion tokens"
    return f"{row['parameters'] / 1e9:,.3g} billion parameters, {row['batch']:,} {unit} a step; cost of {amount}."


def _cells(row: Row) -> tuple[str, ...]:
    if "plan" not in row:
        enough = f"does not fit; `{row['enough']}` would do" if row["enough"] else "does not fit"
        return f"`{row['cluster']}`", enough, *[""] * 6
    unit = "images" if row["unit"] == "rows" else row["unit"]
    micro = f", {row['microbatches']} microbatches" if row["microbatches"] > 1 else ""
    tight = " (tight)" if row["fits"] == "tight" else ""
    return (
        f"`{row['cluster']}`", f"`{row['plan']}`{micro}", f"{row['step_seconds']:.3g} s",
        f"{row['per_second'] / row['devices']:,.0f} {unit}/s", f"{100 * row['fraction_of_peak']:.1f} %",
        f"{row['peak_bytes'] / 2**30:.3g} GiB{tight}", f"{row['device_hours']:,.0f}", f"{row['cost']:,.0f}",
    )  # fmt: skip


def _commands(rows: list[Row]) -> str:
    lines = "\n".join(row["command"] for row in rows)
    return f"\n```bash\n{lines}\n```\n"
