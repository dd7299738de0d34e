"""The report of a run: one self-contained HTML page, made from the files in the run's folder."""

import json
from html import escape
from pathlib import Path
from statistics import median

from tutti.launch.progress import clock
from tutti.plan.plan import Plan
from tutti.train.text import history
from tutti.train.text.config import flatten
from tutti.train.text.history import Lines
from tutti.train.text.picture import loss_curve, plan_picture
from tutti.train.values import NamedValues
from tutti.whole_files import write_text

Rows = list[tuple[str, ...]]

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 900px; margin: 2em auto; color: #222 }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em } svg { max-width: 100% }
table { border-collapse: collapse } th { font-weight: 600 }
td, th { padding: .2em 1em .2em 0; text-align: left }
tr { border-bottom: 1px solid #eee }
pre { background: #f6f6f6; padding: 1em; font-size: 13px; white-space: pre-wrap }
"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{style}</style></head><body>
<h1>{title}</h1>
{summary}
<h2>Loss</h2>
{loss}
<h2>Expected and measured</h2>
{costs}
<h2>The plan</h2>
<p>{plan}. Blue is what a rank holds of a weight and of its optimizer state; layers that are alike share a row.</p>
{picture}
{explain}
<h2>Sample</h2>
<pre>{sample}</pre>
<details><summary>Config</summary>{config}</details>
</body></html>
"""


def write_report(folder: Path, sample: str) -> Path:
    """Write `report.html` into a run's folder, from its history, plan, step.json and run.json."""
    lines = history.read(folder)
    facts = json.loads((folder / "step.json").read_text())
    config = json.loads((folder / "run.json").read_text())["config"]
    plan = Plan.load(folder / "plan.json")
    shapes = {name: tuple(shape) for name, shape in facts["shapes"].items()}
    page = _PAGE.format(
        style=STYLE,
        title=escape(f"{folder.name}: {config['model']['type']}, {facts['parameters'] / 1e6:.1f} M parameters"),
        summary=table(summary(lines, facts, config)),
        loss=loss_curve(history.series(lines, "loss"), history.series(lines, "held_out_loss")),
        costs=table(costs(lines, plan), header=("", "expected", "measured", "measured / expected")),
        picture=plan_picture(plan, shapes),
        plan=escape(facts["plan"]),
        explain=f"<pre>{escape(facts['explain'])}</pre>" if facts["explain"] else "",
        sample=escape(sample),
        config=table([(key, str(value)) for key, value in flatten(config).items()]),
    )
    return save(folder, page)


def save(folder: Path, page: str) -> Path:
    """Write the page of a report at once: a reader sees the old one or the new one."""
    write_text(path := folder / "report.html", page)
    return path


def summary(lines: Lines, facts: NamedValues, config: NamedValues) -> list[tuple[str, ...]]:
    """The rows of the summary table."""
    losses, seconds = history.series(lines, "loss")[1], history.series(lines, "seconds")[1]
    held_out = history.series(lines, "held_out_loss")[1]
    tokens, typical = config["batch"]["size"] * config["batch"]["seq"], median(seconds)
    rows = [
        ("text", f"{config['data']['source']}; {len(losses) * tokens:,} tokens seen in {len(losses)} steps"),
        ("devices", f"{facts['cluster']}, {facts['dtype']}"),
        ("time", f"{clock(sum(seconds))} in training steps"),
        ("speed", f"{tokens / typical:,.0f} tokens/s, {facts['peak_seconds'] / typical:.0%} of {facts['dtype']} peak"),
        ("training loss", f"{losses[0]:.3f} at the first step, {losses[-1]:.3f} at the last"),
    ]
    if waits := history.series(lines, "data_seconds")[1]:
        rows.append(("data", f"steps waited {sum(waits) / sum(seconds):.1%} of that time for their batches"))
    batches = config["eval"]["batches"]
    held_out_loss = f"{held_out[-1]:.3f} on {batches} batches; `tutti eval` takes all the text" if held_out else ""
    return [*rows, ("held-out loss", held_out_loss)] if held_out else rows


def costs(lines: Lines, plan: Plan) -> Rows:
    """Step time and memory per rank: predicted, measured, and their ratio."""
    expected = plan.prediction
    seconds, peaks = history.series(lines, "seconds")[1], history.series(lines, "peak_bytes")[1]
    time = (expected.step_seconds if expected else None), median(seconds)
    memory = (expected.peak_bytes if expected else None), (peaks[-1] if peaks else None)
    return [
        ("time of a step", *_compare(*time, 1e3, "ms")),
        ("peak memory of rank 0, in tensors", *_compare(*memory, 1e-6, "MB")),
    ]


def _compare(expected: float | None, measured: float | None, scale: float, unit: str) -> tuple[str, ...]:
    cells = [f"{x * scale:,.0f} {unit}" if x else "not known" for x in (expected, measured)]
    return (*cells, f"{measured / expected:.2f}" if expected and measured else "")


def table(rows: Rows, header: tuple[str, ...] = ()) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f"<table>\n<tr>{head}</tr>\n{body}</table>"
