"""The memory of a rank over a simulated step as a stacked area chart, by kind.

One panel for each Program of the step, or one for the pipeline device with the highest peak.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import numpy as np

from tutti.analysis.memory import course, platform
from tutti.sim.picture import bare, drawing, legend
from tutti.sim.pipeline import PipelineDryRun
from tutti.sim.step import RANK, DryRun, SimulatedPart
from tutti.sim.tasks import COMPUTE

COLORS = {
    "parameters": "#3b6ea5", "optimizer state": "#9a7bb0", "accumulated gradients": "#6a9a58", "activations": "#e0934a",
    "gradients": "#a9c9a4", "communication": "#c8553d", "temporaries": "#d9b44a", "workspace": "#7aa6d1",
}  # fmt: skip
OTHER = "other"
GIB = 1 << 30

Course = list[tuple[float, Counter[str]]]  # (seconds, bytes by kind from then on)


def save_memory(run: DryRun, path: Path | StringIO) -> None:
    """Write the chart: an .svg, .png or .pdf, or the text of an SVG."""
    panels = courses(run)
    with drawing(path, 10, 1 + 2.6 * len(panels)) as figure:
        all_axes = figure.subplots(len(panels), 1, squeeze=False, sharey=True)
        used = {kind: color for kind, color in {**COLORS, OTHER: "#888888"}.items()
                if any(_sizes(course, kind).any() for _, _, course in panels)}  # fmt: skip
        for axes, (title, seconds, course) in zip(all_axes[:, 0], panels, strict=True):
            times = [1e3 * begin for begin, _ in course] + [1e3 * seconds]
            rows = [np.append(sizes := _sizes(course, kind), sizes[-1:]) for kind in used]
            axes.stackplot(times, rows, colors=list(used.values()), step="post", linewidth=0)
            axes.axhline(run.cluster.device.memory / GIB, color="#222222", linewidth=0.8, linestyle="--")
            axes.set_ylim(0, 1.1 * run.memory.peak / GIB)
            axes.set_ylabel("GiB")
            bare(axes, title, seconds)
        legend(figure, used)


def _sizes(course: Course, kind: str) -> np.ndarray:
    """GiB of a kind, or of all kinds without a color."""
    if kind == OTHER:
        return np.array([sum(n for k, n in now.items() if k not in COLORS) for _, now in course]) / GIB
    return np.array([now[kind] for _, now in course]) / GIB


def courses(run: DryRun) -> Sequence[tuple[str, float, Course]]:
    """(title, seconds, course) of each panel."""
    if not isinstance(run, PipelineDryRun):
        return [(part.title, part.simulation.seconds, _course(run, part)) for part in run.parts]
    spans = [span for span in run.spans if span.device == run.fullest]
    states = zip(spans, run.courses[run.fullest], strict=True)
    return [(f"device {run.fullest}", run.seconds, [(span.begin, now.kinds) for span, now in states])]


def _course(run: DryRun, part: SimulatedPart) -> Course:
    """The memory of a Program from the start of each call on.

    Collectives may wait after they are called, and do not count: the computation after them says when they are called.
    """
    simulation = part.simulation
    tasks = [(simulation.task(span), span.begin) for span in simulation.spans if span.rank == RANK]
    begins = {task.event: begin for task, begin in tasks if task.stream == COMPUTE}
    states, now = [], 0.0
    for call, kinds in course(simulation.replays[RANK], platform(run.cluster.device)):
        now = max(now, begins.get(call, now))  # calls without a span take no time
        states.append((now if states else 0.0, kinds))
    return states
