"""The results of benchmarks: a page for each result, and a list of them."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from generating.page import NOTE, ROOT, escaped
from generating.page import table as cells
from generating.proofs import summary

MOST_ROWS, MOST_COLUMNS = 24, 12


def number(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ""}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return escaped(str(value))


def is_scalar(value: Any) -> bool:
    short = isinstance(value, list) and len(value) <= 4 and all(not isinstance(x, dict | list) for x in value)
    return short or not isinstance(value, dict | list)


def show(value: Any) -> str:
    """A number, a text, or a short list, in which thousands have commas."""
    return "; ".join(map(number, value)) if isinstance(value, list) else number(value)


def flat(value: dict, prefix: str = "") -> dict[str, Any]:
    """Nested scalars by dotted name."""
    figures: dict[str, Any] = {}
    for key, x in value.items():
        if isinstance(x, dict):
            figures |= flat(x, f"{prefix}{key}.")
        elif is_scalar(x):
            figures[f"{prefix}{key}"] = x
    return figures


def table(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))[:MOST_COLUMNS]
    shown = [[show(row.get(column)) for column in columns] for row in rows[:MOST_ROWS]]
    more = len(rows) - MOST_ROWS
    return cells([*map(escaped, columns)], shown) + (f"\n{more} more rows are in the file.\n" if more > 0 else "")


def tables(value: dict, title: str = "") -> Iterator[str]:
    """Tables of a result: scalars first, then lists and dicts of like entries, then what is nested deeper."""
    head = f"**{escaped(title)}**\n\n" if title else ""
    if scalars := {key: x for key, x in value.items() if is_scalar(x)}:
        yield head + table([{"figure": key, "value": x} for key, x in scalars.items()])
    for key, x in value.items():
        name = f"{title}, {key}" if title else key
        if isinstance(x, list) and not is_scalar(x) and all(isinstance(row, dict) for row in x):
            yield f"**{escaped(name)}**\n\n" + table([flat(row) for row in x])
        elif isinstance(x, dict) and x and all(isinstance(row, dict) for row in x.values()):
            rows = {label: flat(row) for label, row in x.items()}
            if len({tuple(row) for row in rows.values()}) == 1 and len(next(iter(rows.values()))) < MOST_COLUMNS:
                yield f"**{escaped(name)}**\n\n" + table([{"": label, **row} for label, row in rows.items()])
            else:
                yield from tables(x, name)
        elif isinstance(x, dict):
            yield from tables(x, name)


META = ("benchmark", "quick", "date", "device", "threads", "versions")


@functools.cache
def results() -> dict[str, dict[str, Any]]:
    """The result files by name, without those of quick runs."""
    files = sorted((ROOT / "benchmarks/results").glob("*.json"))
    return {path.stem: json.loads(path.read_text()) for path in files if not path.stem.endswith("-quick")}


def script_of(result: dict[str, Any]) -> Path:
    return ROOT / "benchmarks" / (result["benchmark"].replace("gpu-", "gpu/") + ".py")


def index() -> str:
    """The list of results."""
    rows = [
        (f"[{name}](benchmarks/{name}.md)", summary(script_of(x)), escaped(x["device"]), x["date"][:10])
        for name, x in results().items()
    ]
    return (
        f"{NOTE}\n# Benchmark results\n\nThe pages show the result files in `benchmarks/results`, with the machine "
        "and date of each run. Times are in seconds and sizes in bytes unless the name says otherwise; items of lists "
        "are separated by semicolons. `python benchmarks/NAME.py` repeats a benchmark; `--quick` runs a smaller case "
        "in about a minute. [Claims](claims.md) discusses the figures.\n\n"
        + cells(("result", "what is measured", "machine", "date"), rows)
    )


def page(name: str) -> str:
    """The page of a result."""
    result = results()[name]
    script = script_of(result)
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    parts = [
        f"{NOTE}\n# {name}\n\n{summary(script)}\n\n- machine: {escaped(result['device'])}; "
        f"threads used: {result['threads']}\n- date: {result['date'][:10]}\n- versions: {versions}\n"
        f"- script: `benchmarks/{script.relative_to(ROOT / 'benchmarks')}`\n\n"
    ]
    if (drawn := ROOT / f"benchmarks/results/{name}.svg").exists():
        parts.append(f"![{name}](../../results/{drawn.name})\n\n")
    return "".join(parts) + "\n".join(tables({key: x for key, x in result.items() if key not in META}))
