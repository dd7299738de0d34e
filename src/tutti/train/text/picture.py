"""Pictures of a run as SVG: the loss, and the layout of parameters under a plan."""

import io
import re
from collections.abc import Mapping
from itertools import groupby
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from tutti.ir.kind import Kind, kind_of, path_of
from tutti.ir.labels import covers
from tutti.plan.layouts.layout import Layout, Mesh, Split
from tutti.plan.plan import Plan

_COVERED, _WHOLE, _LINE, _SECOND = "#3b6ea5", "#e8e8e8", "#777777", "#c8553d"
_RANKS = 8  # columns drawn; more ranks repeat the pattern
_STYLE: Any = {"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9, "axes.edgecolor": _LINE}


def loss_curve(loss: tuple[list[int], list[float]], held_out: tuple[list[int], list[float]]) -> str:
    """The loss of every step, its running mean, and the loss on held-out text; each as (steps, values)."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*loss, color=_COVERED, linewidth=0.5, alpha=0.5)
    axes.plot(loss[0], running_mean(loss[1]), color=_COVERED, linewidth=1.5, label="training")
    if held_out[0]:
        axes.plot(*held_out, color=_SECOND, marker="o", markersize=3, linewidth=1, label="held-out text")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a token)")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return svg(figure)


def running_mean(values: list[float]) -> np.ndarray:
    """Exponential mean over about a fiftieth of the run, corrected for its start as Adam's."""
    decay = 1 - 1 / max(2, len(values) // 50)
    mean, means = 0.0, []
    for i, value in enumerate(values):
        mean = decay * mean + (1 - decay) * value
        means.append(mean / (1 - decay ** (i + 1)))
    return np.array(means)


def plan_picture(plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """A row for each kind of parameter; for each rank, a box of the weight and one of its optimizer state.

    Blue is the rank's shard. `shapes`: parameters by name. Layers with equal layouts share a row.
    """
    rows = _rows(plan, shapes)
    ranks = min(_RANKS, int(np.prod(list(plan.mesh.values()) or [1])))
    figure = Figure(figsize=(4.0 + 1.5 * ranks, 0.7 + 0.33 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), 2 * ranks, squeeze=False)
    for line, (name, shape, layouts) in zip(grid, rows, strict=True):
        for column, axes in enumerate(line):
            _draw(axes, shape, layouts[column % 2], plan.mesh, column // 2)
        text = f"{name}, {' x '.join(map(str, shape))}"
        line[0].text(-0.08, 0.5, text, transform=line[0].transAxes, ha="right", va="center", fontsize=8)
    for column, axes in enumerate(grid[0]):
        places = zip(plan.mesh, coordinates(plan.mesh, column // 2), strict=True)
        where = " ".join(f"{axis} {place}" for axis, place in places)
        title = "optimizer state" if column % 2 else f"rank {column // 2}: {where}\nweight"
        axes.set_title(title, fontsize=8)
    return svg(figure)


def coordinates(mesh: Mesh, rank: int) -> tuple[int, ...]:
    """The position of a rank on each axis; ranks are numbered row-major."""
    return tuple(int(c) for c in np.unravel_index(rank, tuple(mesh.values()) or (1,)))[: len(mesh)]


def covered(size: int, dim: int, layout: Layout, mesh: Mesh, rank: int) -> np.ndarray:
    """Which of the `size` indices of a dim are in a rank's shard, (size,) bool.

    A split of `outer x n x inner` over n gives the rank at place c the indices i with (i // inner) % n == c.
    """
    mask, index = np.ones(size, dtype=bool), np.arange(size)
    for (axis, n), place in zip(mesh.items(), coordinates(mesh, rank), strict=True):
        placement = layout[axis]
        if isinstance(placement, Split) and placement.dim == dim:
            inner = max(1, size // (placement.outer * n))
            mask &= (index // inner) % n == place
    return mask


def _rows(
    plan: Plan, shapes: Mapping[str, tuple[int, ...]]
) -> list[tuple[str, tuple[int, ...], tuple[Layout, Layout]]]:
    """(name, shape, layouts of weight and optimizer state) of each kind of parameter."""
    rows: dict[str, tuple[str, tuple[int, ...], tuple[Layout, Layout]]] = {}
    kinds = sorted({kind_of(label) for label in plan.inputs} - {"param", "buffer", "batch"})
    paths = {path_of(label) for label in plan.inputs if kind_of(label) not in ("buffer", "batch")}
    for name, shape in shapes.items():
        starred = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)
        label = next((path for path in paths if covers(path, name)), starred)
        own = plan.input_layout(Kind.PARAM.at(label))
        states = [plan.inputs[f"{kind}:{label}"] for kind in kinds if f"{kind}:{label}" in plan.inputs]
        layouts = own, (states or [own])[0]
        rows.setdefault(f"{label} {shape} {layouts}", (label, shape, layouts))
    return list(rows.values())


def _draw(axes: Axes, shape: tuple[int, ...], layout: Layout, mesh: Mesh, rank: int) -> None:
    """Draw a tensor as a box, dim 0 downwards, dim 1 to the right. A vector is a flat box."""
    matrix = len(shape) > 1
    rows, columns = (shape[0], int(np.prod(shape[1:]))) if matrix else (1, shape[0] if shape else 1)
    top, height = (0.0, 1.0) if matrix else (0.35, 0.3)
    axes.set(xlim=(0, 1), ylim=(1, 0))
    axes.axis("off")
    axes.add_patch(Rectangle((0, top), 1, height, facecolor=_WHOLE, edgecolor="none"))
    first, last = (0, 1) if matrix else (-1, 0)
    for y, tall in _runs(covered(rows, first, layout, mesh, rank)):
        for x, wide in _runs(_columns(shape, columns, last, layout, mesh, rank)):
            box = (x, top + y * height), wide, tall * height
            axes.add_patch(Rectangle(*box, facecolor=_COVERED, edgecolor="none"))


def _columns(shape: tuple[int, ...], n: int, dim: int, layout: Layout, mesh: Mesh, rank: int) -> np.ndarray:
    """Which columns are in the shard: dim 1 of a matrix, dim 0 of a vector. Further dims are drawn unsplit."""
    size = shape[dim] if shape else 1
    return np.repeat(covered(size, dim, layout, mesh, rank), n // size)


def _runs(mask: np.ndarray) -> list[tuple[float, float]]:
    """(start, length) of the runs of True, as fractions of the whole."""
    runs, start = [], 0
    for value, group in groupby(mask):
        length = len(list(group))
        if value:
            runs.append((start / len(mask), length / len(mask)))
        start += length
    return runs


def svg(figure: Figure) -> str:
    """A figure as an SVG element of a page."""
    text = io.StringIO()
    with rc_context(_STYLE):
        figure.savefig(text, format="svg", transparent=True)
    drawn = text.getvalue()
    return drawn[drawn.index("<svg") :]
