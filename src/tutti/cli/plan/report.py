"""`tutti plan --report plan.html`: the answer as one page that needs neither scripts nor a network."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from html import escape
from pathlib import Path

import tutti
from tutti.cli.plan.answer import LESS, bill, cells, fitting, peak, room
from tutti.cli.plan.workload import Captured, StepWork
from tutti.hardware import Cluster
from tutti.plan.explain import figure, mesh_name, seconds, size
from tutti.plan.plan import Plan, Prediction
from tutti.plan.search.reasons import difference
from tutti.plan.search.search import Search
from tutti.sim.error_bars import MEMORY, error_bar, kind_of
from tutti.sim.gantt import save_gantt
from tutti.sim.memory_picture import COLORS, OTHER, save_memory
from tutti.sim.picture import inline
from tutti.sim.step import DryRun
from tutti.train.text.report import table

GREY = "#98a1ab"
TIMES = {  # parts of a step: color, and the seconds of a prediction
    "computing": ("#3b6ea5", lambda p: p.compute_seconds),
    "waiting for communication": ("#c8553d", lambda p: p.communication_seconds),
    "waiting for transfers": ("#6a9a58", lambda p: p.transfer_seconds),
    "waiting for the pipeline": ("#d9b44a", lambda p: p.bubble_seconds),
}
STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1f2430; --soft: #5d6673; --line: #e3e6ea; --tile: #f5f7f9 }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171c; --ink: #e4e7eb; --soft: #9aa4b1; --line: #2c323b; --tile: #1c2129 }
}
* { box-sizing: border-box }
body { font: 15px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1040px;
  margin: 0 auto; padding: 2.5rem 1.5rem 4rem }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .3rem; overflow-wrap: anywhere }
h2 { font-size: 1.15rem; margin: 2.6rem 0 .8rem; padding-top: 1.2rem; border-top: 1px solid var(--line) }
h3 { font-size: .95rem; margin: 1.6rem 0 .4rem }
p, ul { margin: .5rem 0; max-width: 78ch } li { margin: .3rem 0 } .soft { color: var(--soft) }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: .8rem; margin: 1.6rem 0 }
.tile { background: var(--tile); border-radius: 8px; padding: .8rem 1rem }
.tile b { display: block; white-space: nowrap; font-size: 1.35rem; font-weight: 600 }
.tile span { display: block; color: var(--soft); font-size: .84rem; line-height: 1.4 }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem }
th { font-weight: 600; text-align: left; color: var(--soft) }
td, th { padding: .35rem 1.4rem .35rem 0; vertical-align: top; border-bottom: 1px solid var(--line) }
.ranking td, .ranking th { text-align: right; white-space: nowrap; padding-right: .8rem; font-size: .87rem }
.ranking td:first-child, .ranking th:first-child { text-align: left }
.ranking tr:nth-child(2) td { font-weight: 600 }
.facts td { overflow-wrap: anywhere } .facts td:first-child { color: var(--soft); white-space: nowrap }
.bar { margin: .9rem 0 }
.name { font-size: .9rem; margin-bottom: .25rem; overflow-wrap: anywhere }
.track { position: relative; display: flex; height: 1.5rem; background: var(--tile); border-radius: 4px }
.track i { display: block; height: 100% }
.track u { position: absolute; top: -.25rem; bottom: -.25rem; border-left: 2px dashed var(--ink) }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; font-size: .86rem; color: var(--soft); margin: .6rem 0 }
.key i { display: inline-block; width: .75em; height: .75em; border-radius: 2px; margin-right: .4em }
.scroll svg { min-width: 640px } svg { width: 100%; height: auto } svg text { fill: currentColor }
pre { background: var(--tile); border-radius: 8px; padding: 1rem; font-size: .82rem; line-height: 1.5;
  overflow-x: auto }
pre.wrap { white-space: pre-wrap; overflow-wrap: anywhere } summary { cursor: pointer; margin-top: 1.5rem }
@media print { body { max-width: none; padding: 0 } .tile, pre { border: 1px solid var(--line) } }
"""
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head><body>
<h1>{title}</h1>
<p class="soft">{about}</p>
<div class="tiles">{tiles}</div>
<h2>The plan: {name}</h2>
<p>{verdict}</p>
<ul>{reasons}</ul>
<h2>Time of a step</h2>
{times}
<h3>Timeline</h3>
<div class="scroll">{gantt}</div>
<h2>Memory of a device</h2>
{kinds}
<h3>Over the step{of}</h3>
<div class="scroll">{memory}</div>
<h2>Plans that were simulated</h2>
<div class="scroll ranking">{ranking}</div>
<h2>What was asked</h2>
<pre class="wrap">{command}</pre>
<div class="facts">{asked}</div>
<h3>The cluster</h3>
<div class="facts">{cluster}</div>
<h2>How far to trust this</h2>
<p>{trust}</p>
<details><summary>Everything the plan says</summary><pre>{explain}</pre></details>
<p class="soft">{foot}</p>
</body></html>
"""


def page(
    command: str,
    captured: Captured,
    search: Search,
    plans: Sequence[Plan],
    run: DryRun,
    amount: float = 0.0,
    price: float = 0.0,
) -> str:
    """The page. plans: plans to show, the chosen one first. run: its dry run. amount: number of tokens or rows whose
    time, cost and energy are shown. price: price of a device hour."""
    best, others = plans[0], [plan for plan in plans[1:] if search.fits(plan)]
    cluster, work = search.cluster, captured.facts.work
    shown = [best, *others[:1]]
    rows = [{title: x for title, x in cells(search, plan, work).items() if title not in LESS[:2]} for plan in plans]
    runner_up = [f"The runner-up, {others[0].name}: {difference(best, others[0])}."] if others else []
    return PAGE.format(
        style=STYLE,
        title=escape(f"{model_name(captured.workload.model)} on {cluster}"),
        about=escape(_about(captured, work)),
        tiles="".join(_tiles(search, best, work, amount, price)),
        name=escape(best.name or "without a name"),
        verdict=escape(_verdict(best)),
        reasons="".join(f"<li>{escape(reason)}</li>" for reason in best.reasons or runner_up),
        times=_times(shown),
        gantt=inline(partial(save_gantt, run)),
        kinds=_kinds(shown, cluster),
        of="" if not best.stages else " of the fullest device",
        memory=inline(partial(save_memory, run)),
        ranking=table([tuple(row.values()) for row in rows], tuple(rows[0])),
        command=escape(command),
        asked=table(_asked(captured, best, run)),
        cluster=table(_figures(cluster)),
        trust=escape(_trust(run, cluster)),
        explain=escape(best.explain()),
        foot=escape(f"Tutti {tutti.__version__}. Times and memory are of the programs that the plan would run, "
                    "simulated operator by operator; nothing was measured on these devices."),
    )  # fmt: skip


def model_name(source: str) -> str:
    """A short name of a model: the name of its folder or file, or the function that makes it."""
    path = Path(source)
    return (path.resolve().parent.name if path.name == "config.json" else path.name.removesuffix(".json")) or source


def _about(captured: Captured, work: StepWork) -> str:
    each = f"sequences of {captured.workload.seq:,} tokens" if work.unit == "tokens" else "rows"
    return f"{_count(captured.facts.parameters)} parameters; {captured.facts.batch:,} {each} in a step"


def _count(number: float) -> str:
    for unit, scale in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:,.0f}"


def _tiles(search: Search, best: Plan, work: StepWork, amount: float, price: float) -> list[str]:
    prediction, devices, rate = best.predicted, search.cluster.size, work.amount / best.predicted.step_seconds
    fits = {"yes": "fits", "tight": "tight", "no": "does not fit"}[fitting(search, best)]
    tiles = [
        (seconds(prediction.step_seconds), "a step"),
        (figure(rate), f"{work.unit}/s; {figure(rate / devices)} a device"),
        (f"{100 * prediction.fraction_of_peak:.3g} %", f"of {peak(best, search.cluster)}"),
        (size(prediction.peak_bytes), f"of {size(search.memory)} on a device: {fits}, {room(search, best)}"),
    ]
    if amount:
        its = bill(rate, search.cluster, amount, price)
        of = f"{_count(amount)} {work.unit}"
        tiles.append((its.time, f"for {of}: {figure(its.device_hours)} device hours"))
        tiles += [(figure(its.cost), f"for {of}, at {price:g} a device hour")] if its.cost else []
        watts = f"{search.cluster.device.power:,.0f} W"
        tiles += [(f"{its.mwh} MWh", f"at most: devices alone, at their rated {watts}")] if its.energy else []
    return [f'<div class="tile"><b>{escape(figure)}</b><span>{escape(text)}</span></div>' for figure, text in tiles]


def _verdict(best: Plan) -> str:
    prediction = best.predicted
    share = prediction.compute_seconds / prediction.step_seconds
    lost = {what: of(prediction) / prediction.step_seconds for what, (_, of) in list(TIMES.items())[1:]}
    most = max(lost, key=lambda what: lost[what])
    also = f"; {100 * lost[most]:.0f} % of it goes into {most}" if lost[most] >= 0.01 else ""
    count = f", {best.accumulate} microbatches an update" if best.accumulate > 1 else ""
    return f"Mesh {mesh_name(best.mesh)}{count}. Devices compute {100 * share:.0f} % of the time{also}."


def _bar(name: str, pieces: Sequence[tuple[str, float, str]], scale: float, mark: float = 0.0) -> str:
    """A row of blocks (color, amount, what it is), of which `scale` fills the width. mark: where a line is drawn."""
    blocks = "".join(f'<i style="width:{100 * amount / scale:.2f}%;background:{color}" title="{escape(title)}"></i>'
                     for color, amount, title in pieces)  # fmt: skip
    line = f'<u style="left:{100 * mark / scale:.2f}%"></u>' if mark else ""
    return f'<div class="bar"><div class="name">{escape(name)}</div><div class="track">{blocks}{line}</div></div>'


def _key(entries: Sequence[tuple[str, str]]) -> str:
    spans = (f'<span><i style="background:{color}"></i>{escape(text)}</span>' for color, text in entries)
    return f'<div class="key">{"".join(spans)}</div>'


def _times(plans: Sequence[Plan]) -> str:
    """A bar for the chosen plan and one for the runner-up, on one scale, and what the first consists of."""
    scale = max(plan.predicted.step_seconds for plan in plans)
    bars, key = [], []
    for plan in plans:
        prediction = plan.predicted
        step = prediction.step_seconds
        amounts = [(color, of(prediction), what) for what, (color, of) in TIMES.items()]
        rest = step - sum(amount for _, amount, _ in amounts)
        amounts += [(GREY, rest, "other")] if rest > 0.005 * step else []
        parts = [(color, amount, f"{what} {seconds(amount)}") for color, amount, what in amounts if amount]
        bars.append(_bar(f"{plan.name}, {seconds(step)}", parts, scale))
        key = key or [(color, f"{title} ({100 * amount / step:.1f} %)") for color, amount, title in parts]
    hidden = plans[0].predicted.hidden_seconds
    note = f"<p>Another {escape(seconds(hidden))} of communication runs while devices compute.</p>" if hidden else ""
    return "".join(bars[:1]) + _key(key) + note + "".join(bars[1:])


def _kinds(plans: Sequence[Plan], cluster: Cluster) -> str:
    """A bar of kinds of memory for the chosen plan and one for the runner-up, against what a device has."""
    has = cluster.device.memory
    scale = 1.02 * max(has, *(plan.predicted.peak_bytes for plan in plans))
    bars, key = [], []
    for plan in plans:
        parts = [
            (COLORS.get(kind, GREY), amount, f"{kind} {size(amount)}") for kind, amount in _largest(plan.predicted)
        ]
        bars.append(_bar(f"{plan.name}, {size(plan.predicted.peak_bytes)}", parts, scale, has))
        key = key or [(color, title) for color, _, title in parts]
    return "".join(bars[:1]) + _key([*key, ("var(--ink)", f"dashed: the {size(has)} of a device")]) + "".join(bars[1:])


def _largest(prediction: Prediction) -> list[tuple[str, int]]:
    """The kinds of memory at the peak, the largest first; what is below a hundredth of the peak is put together."""
    kinds = sorted(prediction.bytes_by_kind.items(), key=lambda item: -item[1])
    large = [(kind, count) for kind, count in kinds if count >= 0.01 * prediction.peak_bytes]
    rest = prediction.peak_bytes - sum(count for _, count in large)
    return [*large, (OTHER, rest)] if rest > 0 else large


def _asked(captured: Captured, best: Plan, run: DryRun) -> list[tuple[str, ...]]:
    w = captured.workload
    masters = ", with float32 masters" if w.masters and w.dtype != "float32" else ""
    return [
        ("model", w.model), ("parameters", f"{captured.facts.parameters:,}"), ("dtype", f"{w.dtype}{masters}"),
        ("optimizer", w.optimizer), ("batch", f"{captured.facts.batch:,}"), ("tokens of a sequence", f"{w.seq:,}"),
        ("work of a step", f"{run.flops:.3g} FLOP"), ("level", best.predicted.level),
    ]  # fmt: skip


def _figures(cluster: Cluster) -> list[tuple[str, ...]]:
    device = cluster.device
    dtype = "bfloat16" if "bfloat16" in device.peak else next(iter(device.peak))
    links = [(f"link between {n:,}", f"{link.bandwidth / 1e9:,.0f} GB/s each way; {link.source.split(';')[0]}")
             for n, link in cluster.levels if n > 1]  # fmt: skip
    return [
        ("devices", f"{cluster.size:,} {device.name}"), ("memory", size(device.memory)),
        ("memory bandwidth", f"{device.bandwidth / 1e9:,.0f} GB/s"),
        ("peak", f"{device.peak[dtype] / 1e12:,.1f} TFLOP/s in {dtype}"), *links,
        *([("rated power", f"{device.power:,.0f} W")] if device.power else []), ("source", device.source),
    ]  # fmt: skip


def _trust(run: DryRun, cluster: Cluster) -> str:
    time, memory = error_bar(kind_of(run), cluster), error_bar(MEMORY, cluster)
    if not time or not memory:
        return "No published runs on such devices were compared with predictions: compare one run of your own first."
    return (
        f"Of published training runs on such devices, the times of two thirds are within {100 * time:.0f} % of what is "
        f"predicted for them, and the memory of two thirds within {100 * memory:.0f} %. A real run also loads data "
        "and writes checkpoints, and shares its network with others."
    )
