"""Pictures of a run: energies, temperature and pressure against time, g(r)."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def columns(path: Path) -> dict[str, Tensor]:
    """The columns of a log of the first replica, those with numbers, by their names without units."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["replica"] == "0"]
    names = [n for n in (rows[0] if rows else {}) if rows[0][n]]
    values = {name: torch.tensor([float(row[name]) for row in rows], dtype=torch.float64) for name in names}
    return {name.partition(" (")[0]: column for name, column in values.items()}


def titles(path: Path) -> dict[str, str]:
    """The names of the columns of a log with units, by those without."""
    with open(path, newline="", encoding="utf-8") as file:
        return {name.partition(" (")[0]: name for name in next(csv.reader(file), [])}


def draw(folder: Path) -> None:
    """Write run.png from the log and the distribution in a folder."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    log = folder / "log.csv"
    series, names = (columns(log), titles(log)) if log.exists() else ({}, {})
    panels = [n for n in ("potential", "conserved", "temperature", "pressure", "volume") if len(series.get(n, ())) > 1]
    rdf: dict[str, Any] | None = (
        json.loads((folder / "rdf.json").read_text()) if (folder / "rdf.json").exists() else None
    )
    count = len(panels) + (rdf is not None)
    if not count:
        return
    figure, axes = pyplot.subplots(1, count, figsize=(3.2 * count, 2.8), layout="constrained", squeeze=False)
    for axis, name in zip(axes[0], panels, strict=False):
        axis.plot(series["time"], series[name], lw=0.8, color="#3566a8")
        axis.axhline(float(series[name].mean()), lw=0.8, color="#888888", ls=":")
        axis.set(xlabel=names["time"], title=names[name])
    if rdf is not None:
        axis = axes[0][-1]
        r, g = torch.tensor(rdf["r"]), torch.tensor(rdf["g"])
        axis.plot(r, g, lw=1, color="#c4572f")
        if rdf["error"]:
            e = 2 * torch.tensor(rdf["error"])
            axis.fill_between(r, g - e, g + e, color="#c4572f", alpha=0.25, lw=0)
        axis.set(xlabel="distance", title="g(r)", ylim=(0, None))
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / "run.png", dpi=110)
    pyplot.close(figure)
