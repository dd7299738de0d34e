"""A simulated step as a Gantt chart."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from pathlib import Path

from tutti.sim.panels import MANY, Panel, panels
from tutti.sim.picture import bare, drawing, legend
from tutti.sim.pipeline import PipelineDryRun
from tutti.sim.step import DryRun

COLORS = {
    "forward": "#3b6ea5", "backward": "#7aa6d1", "gradients": "#a9c9a4", "update": "#9a7bb0", "call": "#3b6ea5",
    "preparation": "#b58ca0",
    "all_reduce": "#c8553d", "all_gather": "#e0934a", "reduce_scatter": "#d9b44a", "all_to_all": "#6a9a58",
    "ppermute": "#4f8f8b", "exchange": "#6a9a58",
    "waits for others": "#dddddd",
}  # fmt: skip


def save_gantt(run: DryRun, path: Path | StringIO) -> None:
    """Write the chart: an .svg, .png or .pdf, or the text of an SVG.

    One panel for each Program of the step, or one for a pipeline, and one for its begin if it has many microbatches.
    """
    apart = 0.5 if isinstance(run, PipelineDryRun) else 0.0  # keep microbatches distinguishable
    draw(panels(run), path, apart)


def draw(panels: Sequence[Panel], path: Path | StringIO, apart: float = 0.0) -> None:
    """Write a chart of some panels. apart: line width around blocks."""
    rows = [panel_rows for _, _, panel_rows in panels]
    with drawing(path, 10, 1.2 + 0.6 * len(rows) + 0.35 * sum(map(len, rows))) as figure:
        all_axes = figure.subplots(len(rows), 1, squeeze=False, height_ratios=[len(r) for r in rows])
        used: dict[str, None] = {}
        for axes, (title, seconds, panel_rows) in zip(all_axes[:, 0], panels, strict=True):
            for y, (name, blocks) in enumerate(panel_rows.items()):
                for kind, pieces in blocks.items():
                    bars = [(1e3 * begin, 1e3 * (end - begin)) for begin, end in pieces]
                    color = COLORS.get(kind, "#888888")
                    gap = apart if len(pieces) < MANY else 0.0  # many blocks would be all gaps
                    axes.broken_barh(bars, (y - 0.4, 0.8), facecolor=color, edgecolor="white", linewidth=gap)
                    used[kind] = None
                axes.text(-0.008, y, name, ha="right", va="center", transform=axes.get_yaxis_transform())
            axes.set_ylim(len(panel_rows) - 0.5, -0.5)
            axes.set_yticks([])
            bare(axes, title, seconds)
        legend(figure, {kind: color for kind, color in COLORS.items() if kind in used})
