"""Pictures of a run: losses, properties of the samples, hits, calibration of the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

COLORS = ("#888888", "#3566a8", "#c4572f", "#3f8f5b", "#8a5aa8", "#b8901f")


def draw(path: Path, losses: dict[str, list[tuple[int, float]]], values: dict[str, dict[str, np.ndarray]],
         edges: dict[str, tuple[float, ...]], oracle: dict[str, Any]) -> None:  # fmt: skip
    """Write a PNG.

    losses: training -> (step, loss). values: property -> set of peptides -> (peptides,), with the edges of the bins as
    lines. oracle: what `scores.assess` returns; empty for none.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = 1 + len(values) + ("bins" in oracle)
    figure = Figure(figsize=(3.6 * count, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = iter(figure.subplots(1, count, squeeze=False)[0])
    axis = next(axes)
    for color, (name, points) in zip(cycle(COLORS[1:]), losses.items(), strict=False):
        axis.plot([x for x, _ in points], [y for _, y in points], color=color, label=name)
    axis.set(xlabel="step", title="loss per residue, nats")
    axis.legend(frameon=False)
    for name, sets in values.items():
        axis = next(axes)
        _histogram(axis, sets)
        for edge in edges[name]:
            axis.axvline(edge, color="#cccccc", lw=0.8, zorder=0)
        axis.set(xlabel=name, title=f"{name}, with edges of bins")
    if "bins" in oracle:
        axis = next(axes)
        axis.plot([0, 1], [0, 1], color="#888888", lw=0.8, ls=":")
        axis.plot([p for p, _, _ in oracle["bins"]], [f for _, f, _ in oracle["bins"]], "o-", color=COLORS[1], ms=4)
        axis.set(xlabel="predicted probability", ylabel="fraction held out", title="calibration of the oracle")
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def _histogram(axis: Any, sets: dict[str, np.ndarray]) -> None:
    finite: Sequence[np.ndarray] = [x[np.isfinite(x)] for x in sets.values()]
    together = np.concatenate(finite) if finite else np.zeros(0)
    if not len(together):
        return
    edges = np.linspace(together.min() - 1e-9, together.max() + 1e-9, 31)
    for color, name, x in zip(cycle(COLORS), sets, finite, strict=False):
        if len(x):
            axis.hist(x, edges, weights=np.full(len(x), 1 / len(x)), histtype="step", color=color, label=name)
    axis.legend(frameon=False, fontsize=7)
    axis.set(ylabel="fraction of peptides")
