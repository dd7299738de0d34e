"""Predictions against published runs: benchmarks/results/published.json with what was run, in words."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Any

from generating.benchmarks import results
from generating.page import NOTE, ROOT, escaped, table

Row = dict[str, Any]
ERRORS = {"error": "time", "memory_error": "memory"}


def page() -> str:
    result = results()["published"]
    rows: list[Row] = result["rows"]
    runs = {run["row"]: run for run in json.loads((ROOT / "benchmarks/published_runs/runs.json").read_text())["rows"]}
    fast = sum(row["error"] < 0 for row in rows)
    return (
        f"{NOTE}\n# Predictions against published runs\n\n"
        f"{len(rows)} training runs whose step times were published by others, predicted as `tutti plan` and "
        "`tutti dryrun` predict them: from the datasheets of the devices and published measurements of kernels. "
        "Nothing is fitted to these or other steps. An error is predicted over published, less one: below zero, the "
        f"prediction is too fast. {fast} of {len(rows)} are.\n\n"
        "![predicted over published time of each run](results/published.svg)\n\n"
        "## Errors by kind\n\n"
        "Two thirds of the runs are within the error bar, which `tutti plan` prints beside a prediction.\n\n"
        + table(
            ("", "runs", "mean", "mean without sign", "median without sign", "largest", "error bar"), _kinds(result)
        )
        + "\n## Runs\n\n"
        "Times are of a step. The plan is the nearest that has a name; what a run does otherwise counts as error. Rows "
        "are numbered as in `benchmarks/published_runs/runs.json`.\n\n"
        + table(
            (
                "",
                "model",
                "cluster",
                "batch",
                "plan",
                "published",
                "predicted",
                "error",
                "memory",
                "predicted",
                "error",
            ),
            (_cells(row, runs.get(row["row"], {})) for row in rows),
        )
        + "\n## Sources\n\n"
        + table(("rows", "source"), _sources(rows, runs))
        + f"\nLast run on {result['date'][:10]}; `python benchmarks/published.py` repeats it. "
        "[Prediction](guide/prediction.md) says what is simulated, and the "
        "[claims](proofs/claims-planning.md) what these errors mean.\n"
    )


def _kinds(result: Row) -> list[tuple[str, ...]]:
    """A line for each kind of run and for memory."""
    lines = []
    for kind, its in result["by_kind"].items():
        rows = [row for row in result["rows"] if row["kind"] == kind] or result["rows"]
        what = "memory_error" if kind == "memory" else "error"
        errors = [row[what] for row in rows if row[what] is not None]
        lines.append((kind if kind == "memory" else f"time, {kind}", str(its["rows"]), _signed(statistics.mean(errors)),
                      *(f"{100 * its[key]:.1f} %" for key in ("mean", "median", "largest", "error_bar"))))  # fmt: skip
    return lines


def _cells(row: Row, run: Row) -> tuple[str, ...]:
    batch = f"{run['global_batch']:,} x {run['sequence']:,}" if run else ""
    micro = f", {run['microbatches']} microbatches" if run and run["microbatches"] > 1 else ""
    memory = row["published_gib"]
    return (
        row["row"], escaped(row["model"]), row["cluster"], batch, f"`{row['plan']}`{micro}",
        f"{row['published_seconds']:.4g} s", f"{row['predicted_seconds']:.4g} s", _signed(row["error"]),
        f"{memory:.3g} GiB" if memory else "", f"{row['predicted_gib']:.3g} GiB", _signed(row["memory_error"]),
    )  # fmt: skip


def _signed(error: float | None) -> str:
    return "" if error is None else f"{100 * error:+.1f} %"


def _sources(rows: Sequence[Row], runs: dict[str, Row]) -> list[tuple[str, str]]:
    named: dict[str, list[str]] = {}
    for row in rows:
        named.setdefault(runs.get(row["row"], row)["source"], []).append(row["row"])
    return [(", ".join(numbers), escaped(source)) for source, numbers in named.items()]
