"""A plan in words: its cost, layouts and communication, and the reasons for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tutti.ir.kind import kind_of, split_name
from tutti.plan.layouts.layout import Mesh, R
from tutti.plan.pipeline.draw import drawn
from tutti.plan.variant import LAYERS

if TYPE_CHECKING:
    from tutti.plan.plan import Plan, Prediction

MOST = 8  # maximum number of names in a list
LARGEST = 5  # number of kinds of memory that are named
NOT_STATE = ("param", "buffer", "batch", "common", "grad", "lr", "step", "count", "seed", "constant")


def explain(plan: Plan) -> str:
    """A text of at most about a page. Layers that share a label share a line, so it does not grow with depth."""
    on = f" on {plan.cluster}" if plan.cluster else ""
    lines = [f"plan {plan.name or '(without a name)'}: mesh {mesh_name(plan.mesh)}{on}"]
    if plan.stages:
        chunks = f" over {plan.sequence_chunks} chunks of the sequence" if plan.sequence_chunks > 1 else ""
        schedule = plan.schedule or "each of which a call runs once"
        lines.append(f"a pipeline of {1 + max(plan.stages.values())} stages, {schedule}{chunks}")
        lines += _table([_stages(plan, run) for run in _equal_stages(plan)], "  ")
        lines += ["", *drawn(plan), ""] if plan.schedule else []
    if plan.recompute == (LAYERS,):
        lines.append("the backward pass recomputes activations that layers do not pass on")
    elif plan.recompute:
        named = ", ".join(plan.recompute[:MOST]) + (", ..." if len(plan.recompute) > MOST else "")
        many = f"{len(plan.recompute)} operators: " if any("/" in label for label in plan.recompute) else ""
        lines.append(f"the backward pass recomputes {many}{named}")
    if plan.matmul_dtype:
        again = ", weights are rounded in every microbatch" if plan.reround else ""
        lines.append(f"matrix products of layers are in {plan.matmul_dtype.upper()}{again}")
    lines += _tiers(plan.tiers)
    if plan.batch_splits > 1:
        lines.append(f"the batch is cut into {plan.batch_splits} copies: one computes while another communicates")
    if plan.overlap_chunks > 1:
        lines.append(
            f"regions between communications are computed in {plan.overlap_chunks} parts: one computes while another "
            "communicates"
        )
    if plan.accumulate > 1:
        lines.append(f"{plan.accumulate} microbatches per update"
                     + (f", gradients added in {plan.sum_dtype}" if plan.sum_dtype else ""))  # fmt: skip
    if plan.prediction:
        lines += _predicted(plan.prediction)
    lines += ["", *_layouts(plan)]
    if plan.reasons:
        lines += ["", "why", *(f"  {reason}" for reason in plan.reasons)]
    return "\n".join(lines)


def _predicted(prediction: Prediction) -> list[str]:
    bubble = f", {seconds(prediction.bubble_seconds)} for the pipeline" if prediction.bubble_seconds else ""
    overlapped = prediction.hidden_seconds
    hidden = f" ({seconds(overlapped)} more are hidden behind computing)" if overlapped > 1e-9 else ""
    level = f" at {prediction.level}" if prediction.level else ""
    peak = f"of the {prediction.peak_dtype} peak" if prediction.peak_dtype else "of peak"
    lines = [
        f"predicted step   {seconds(prediction.step_seconds)}{level}: {seconds(prediction.compute_seconds)} computing, "
        f"{seconds(prediction.communication_seconds)} waiting for communication{hidden}{bubble}; "
        f"{100 * prediction.fraction_of_peak:.3g} % {peak}",
        f"predicted memory {size(prediction.peak_bytes)} per device"
        + "".join(
            f"{',' if i else ':'} {kind} {size(n)}" for i, (kind, n) in enumerate(_largest(prediction.bytes_by_kind))
        ),
        f"sent per step    {size(prediction.communication_bytes)} by each device",
    ]
    if prediction.bytes_by_tier:
        there = ", ".join(f"{size(count)} on the {tier}" for tier, count in prediction.bytes_by_tier.items())
        lines.append(
            f"other tiers      {there} per device; {seconds(prediction.transfer_seconds)} waiting for transfers"
        )
    rows = [(kind, str(count), size(sent)) for kind, (count, sent) in sorted(prediction.collectives.items())]
    return [*lines, *_table(rows, "  ")]


def _tiers(tiers: Mapping[str, str]) -> list[str]:
    """One line per tier: the kinds of inputs on it, and the number of forward operators whose results it stores."""
    lines = []
    for tier in dict.fromkeys(tiers.values()):
        there = [label for label, at in tiers.items() if at == tier]
        kinds = dict.fromkeys(kind_of(label) for label in there if ":" in label.partition("/")[0])
        results = sum(":" not in label.partition("/")[0] for label in there)
        waits = f"{', and ' if kinds else ''}results of {results} operators of the forward pass" if results else ""
        lines.append(f"on the {tier}: {', '.join(kinds)} of {len(there) - results} inputs{waits}")
    return lines


def _by_stage(plan: Plan) -> list[tuple[int, list[str]]]:
    names: dict[int, list[str]] = defaultdict(list)
    for name, stage in plan.stages.items():
        names[stage].append(name)
    return sorted(names.items())


def _equal_stages(plan: Plan) -> list[list[tuple[int, list[str]]]]:
    """Runs of consecutive stages with as many layers and, as printed, the same durations."""
    runs: list[list[tuple[int, list[str]]]] = []
    for stage, names in _by_stage(plan):
        if runs and _alike(plan, stage, names) == _alike(plan, *runs[-1][-1]):
            runs[-1].append((stage, names))
        else:
            runs.append([(stage, names)])
    return runs


def _alike(plan: Plan, stage: int, names: list[str]) -> tuple:
    return len(names), {name.rpartition(".")[0] for name in names}, _durations(plan, stage)


def _durations(plan: Plan, stage: int) -> tuple[str, ...]:
    """Seconds of the forward and backward pass of a microbatch, if known."""
    if not plan.durations:
        return ()
    forward, backward, rest, _ = plan.durations[stage]
    return f"{seconds(forward)} forward", f"{seconds(backward + rest)} backward"


def _stages(plan: Plan, run: list[tuple[int, list[str]]]) -> tuple[str, ...]:
    """Numbers, durations and layers of equal stages."""
    (first, names), (last, _) = run[0], run[-1]
    layers = _ranges([name for _, names in run for name in names])
    if len(run) == 1:
        return f"stage {first}", *_durations(plan, first), layers
    each = f"{counted(len(names), 'layer')} each, " if all(name[-1].isdigit() for name in names) else ""
    return f"{len(run)} stages, {first}-{last}", *_durations(plan, first), each + layers


def _ranges(names: list[str]) -> str:
    """The names; consecutive numbered layers as a range (`h.0-3`). Of a long list only the first and the last."""
    shown: list[tuple[str, str]] = []  # first, last
    for name in names:
        stem, _, number = name.rpartition(".")
        before = shown[-1][1].rpartition(".") if shown else ("", "", "")
        if number.isdigit() and before[0] == stem and before[2].isdigit() and int(before[2]) + 1 == int(number):
            shown[-1] = shown[-1][0], name
        else:
            shown.append((name, name))
    texts = [first if first == last else f"{first}-{last.rpartition('.')[2]}" for first, last in shown]
    return ", ".join(texts if len(texts) <= MOST else [texts[0], "...", texts[-1]])


def _largest(kinds) -> list[tuple[str, int]]:
    ordered = sorted(((kind, n) for kind, n in kinds.items() if n), key=lambda item: -item[1])
    rest = sum(n for _, n in ordered[LARGEST:])
    return ordered[:LARGEST] + ([("other", rest)] if rest else [])


def _layouts(plan: Plan) -> list[str]:
    """A line for each parameter that is split or has split optimizer state, and for each other split input."""
    places: dict[str, dict[str, str]] = defaultdict(dict)
    for label, layout in plan.inputs.items():
        kind, path = split_name(label)
        if layout.placements:
            places[path if kind == "param" or kind not in NOT_STATE else f"{kind} {path}"][kind] = str(layout)
    rows = []
    for name, kinds in places.items():
        state = dict.fromkeys(text for kind, text in kinds.items() if kind not in NOT_STATE)
        own = next((text for kind, text in kinds.items() if kind in NOT_STATE), str(R))
        rows.append((name, own, " or ".join(state)))
    if not rows:
        where = "every device of its stage" if plan.stages else "every device"
        return [f"everything is replicated on {where}"]
    rows.sort(key=lambda row: row[0].startswith(("batch ", "grad ")))
    head = ("layouts", "", "optimizer state" if any(state for *_, state in rows) else "")
    return [
        *_table([head, *rows], ""),
        "S<dim>: split at this dim, S<dim>/<n>: inside each of n blocks, P: a sum of which each device has a part;",
        "everything else is replicated",
    ]


def _table(rows: list[tuple[str, ...]], indent: str) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [indent + "  ".join(f"{c:{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def mesh_name(mesh: Mesh) -> str:
    """`dp 2 x tp 4`."""
    return " x ".join(f"{axis} {n}" for axis, n in mesh.items())


def seconds(value: float) -> str:
    """Three digits with a unit: `1.86 s`, `734 ms`, `12 us`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-6:.3g} us"


def counted(count: int, one: str, several: str = "") -> str:
    """`1 mesh`, `2 meshes`: a number and a noun, by default with an s."""
    return f"{count:,} {one if count == 1 else several or f'{one}s'}"


def figure(value: float) -> str:
    """At least three digits: `5.78`, `12,345`."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def size(count: float) -> str:
    """Three digits with a unit: `60.7 GiB`, `512 KiB`."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}" if count < 1000 * scale else f"{count / scale:,.0f} {unit}"
    return f"{count:.0f} B"
