"""A simulated step as a Gantt chart. Per rank, one row for computation and one for each axis it communicates over; for
a pipeline, one row per device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from tutti.sim.picture import STYLE, bare, check_suffix, legend, save
from tutti.sim.pipeline import PipelineDryRun
from tutti.sim.simulate import Simulation
from tutti.sim.step import DryRun
from tutti.sim.tasks import COMPUTE

COLORS = {
    "forward": "#3b6ea5", "backward": "#7aa6d1", "gradients": "#a9c9a4", "update": "#9a7bb0", "call": "#3b6ea5",
    "all_reduce": "#c8553d", "all_gather": "#e0934a", "reduce_scatter": "#d9b44a", "all_to_all": "#6a9a58",
    "ppermute": "#4f8f8b", "exchange": "#6a9a58",
    "waits for others": "#dddddd",
}  # fmt: skip
RESOLUTION = 4000  # blocks closer than the length over this are drawn as one


Rows = dict[str, dict[str, list[tuple[float, float]]]]  # row -> kind of work -> (begin, end)
Panel = tuple[str, float, Rows]  # title, seconds, rows


def save_gantt(made: DryRun, path: Path) -> None:
    """Write the chart: an .svg, .png or .pdf. One panel for each Program of the step, or one for a pipeline."""
    apart = 0.5 if isinstance(made, PipelineDryRun) else 0.0  # keep microbatches distinguishable
    draw(panels(made), path, apart)


def draw(drawn: Sequence[Panel], path: Path, apart: float = 0.0) -> None:
    """Write a chart of some panels. apart: line width around blocks."""
    check_suffix(path)
    rows = [held for _, _, held in drawn]
    height = 1.2 + 0.6 * len(rows) + 0.35 * sum(map(len, rows))
    with rc_context(STYLE):
        figure = Figure(figsize=(10, height), layout="constrained")
        below = figure.subplots(len(rows), 1, squeeze=False, height_ratios=[len(r) for r in rows])
        used: dict[str, None] = {}
        for axes, (title, seconds, held) in zip(below[:, 0], drawn, strict=True):
            for y, (name, blocks) in enumerate(held.items()):
                for kind, pieces in blocks.items():
                    bars = [(1e3 * begin, 1e3 * (end - begin)) for begin, end in pieces]
                    color = COLORS.get(kind, "#888888")
                    axes.broken_barh(bars, (y - 0.4, 0.8), facecolor=color, edgecolor="white", linewidth=apart)
                    used[kind] = None
                axes.text(0, y, f"{name}  ", ha="right", va="center", transform=axes.get_yaxis_transform())
            axes.set_ylim(len(held) - 0.5, -0.5)
            axes.set_yticks([])
            bare(axes, title, seconds)
        legend(figure, {kind: color for kind, color in COLORS.items() if kind in used})
        save(figure, path)


def panels(made: DryRun) -> list[Panel]:
    """The panels of a simulated step."""
    if not isinstance(made, PipelineDryRun):
        return [(part.title, part.simulation.seconds, _rows(part.simulation)) for part in made.parts]
    rows: Rows = {f"device {d}": defaultdict(list) for d in range(len(made.memories))}
    for span in made.spans:
        if span.work:
            rows[f"device {span.device}"][span.work].append((span.begin, span.end))
    return [("a step", made.seconds, rows)]


def _rows(made: Simulation) -> Rows:
    """The times by rank and stream, then by kind or phase."""
    rows: Rows = {}
    for rank in made.ranks:
        streams = list(dict.fromkeys([COMPUTE, *(task.stream for task in made.tasks[rank])]))
        for stream in streams:
            name = f"rank {rank} {'computes' if stream == COMPUTE else stream}"
            spans = [s for s in made.spans if s.rank == rank and made.task(s).stream == stream]
            blocks = [(made.task(s).kind or made.task(s).phase or "other", s.begin, s.end) for s in spans]
            rows[name] = row(blocks, made.seconds)
    return rows


def row(blocks: Iterable[tuple[str, float, float]], seconds: float) -> dict[str, list[tuple[float, float]]]:
    """The times of blocks (kind, begin, end) by kind. Blocks too close to distinguish are merged."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    last = ""
    for kind, begin, end in sorted(blocks, key=lambda block: block[1]):
        held = found[kind]
        if held and kind == last and begin - held[-1][1] <= seconds / RESOLUTION:
            held[-1] = held[-1][0], end
        else:
            held.append((begin, end))
        last = kind
    return dict(found)
