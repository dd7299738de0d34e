"""The report of a run: one self-contained HTML page with what its log has, and completions of its last rounds."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from tutti.align.policy import COMPLETIONS
from tutti.train.text.picture import svg
from tutti.train.text.report import STYLE, save, table

SHOWN, LONGEST = 32, 600  # completions in the page, and characters of each
FIRST = (
    "reward", "loss", "eval_reward", "objective/kl", "kl", "entropy", "clip_ratio", "rewards/accuracies",
    "rewards/margins", "completions/mean_length", "grad_norm",
)  # fmt: skip
BESIDE = "epoch", "step", "total_flos"  # entries of a log that are no curves
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{style}</style></head><body>
<h1>{title}</h1>
{last}
<h2>Curves</h2>
{curves}
{completions}
</body></html>
"""


def write_report(folder: Path, title: str, log: Sequence[Mapping[str, Any]]) -> Path:
    """Write `report.html` into a run's folder. log: `trainer.state.log_history`."""
    curves = curves_of(log)
    last = [(name, f"{values[0]:.4g}", f"{values[-1]:.4g}") for name, (_, values) in curves.items()]
    page = PAGE.format(
        title=escape(title), style=STYLE, last=table(last, ("", "first", "last")),
        curves=picture(curves) if curves else "", completions=_completions(folder / COMPLETIONS),
    )  # fmt: skip
    return save(folder, page)


def curves_of(log: Sequence[Mapping[str, Any]]) -> dict[str, tuple[list[int], list[float]]]:
    """The steps and values of each number that a log has more than once, the usual ones first."""
    curves: dict[str, tuple[list[int], list[float]]] = {}
    for entry in log:
        for name, value in entry.items():
            if name not in BESIDE and isinstance(value, int | float):
                steps, values = curves.setdefault(name, ([], []))
                steps.append(int(entry["step"]))
                values.append(float(value))
    order = {name: i for i, name in enumerate(FIRST)}
    names = sorted((x for x in curves if len(curves[x][0]) > 1), key=lambda x: (order.get(x, len(order)), x))
    return {name: curves[name] for name in names}


def picture(curves: Mapping[str, tuple[Sequence[int], Sequence[float]]]) -> str:
    """A panel for each curve, as SVG."""
    columns = 3
    rows = -(-len(curves) // columns)
    figure = Figure(figsize=(9, 2 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for axes, (name, (steps, values)) in zip(panels, curves.items(), strict=False):
        axes.plot(steps, values, linewidth=1)
        axes.set_title(name, fontsize=9)
        axes.tick_params(labelsize=7)
    for axes in list(panels)[len(curves) :]:
        axes.set_axis_off()
    return svg(figure)


def _completions(path: Path) -> str:
    """The last completions of a run that writes them."""
    if not path.exists():
        return ""
    with path.open() as file:
        rows = [x for line in deque(file, SHOWN) if (x := _parsed(line))]
    cells = [(str(x["step"]), "" if x["reward"] is None else f"{x['reward']:.4g}", _text(x["prompt"]),
              _text(x["completion"])) for x in rows]  # fmt: skip
    return f"<h2>Completions</h2>\n{table(cells, ('step', 'reward', 'prompt', 'completion'))}"


def _parsed(line: str) -> dict[str, Any] | None:
    """The row of a line; None for one that a killed run has left unfinished."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


def _text(x: Any) -> str:
    text = x if isinstance(x, str) else "\n".join(f"{m.get('role')}: {m.get('content')}" for m in x)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."
