"""A recorded step as a picture and as a timeline, in the form of a simulated one, drawn below it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tutti.observe.recording import Recording
from tutti.observe.shares import arrivals, late
from tutti.sim.gantt import draw
from tutti.sim.panels import Panel, Rows, row
from tutti.sim.tasks import COMPUTE
from tutti.sim.timeline import block as event
from tutti.sim.timeline import names

STANDS = "communicate"
LATE = "waits for others"
DRAWN = 8  # ranks

Piece = tuple[str, str, str, float, float]  # stream, kind, label, begin, end


def typical(recording: Recording) -> int:
    """The recorded step with the median time."""
    steps = sorted(recording.steps, key=lambda step: max(taken.seconds for _, taken in recording.of(step)))
    return steps[len(steps) // 2]


def pieces(recording: Recording, step: int) -> list[list[Piece]]:
    """The work of each rank in a step. Seconds count from the first rank's start."""
    came = arrivals(recording, step)
    zero = min(taken.begin for _, taken in recording.of(step))
    rows = []
    for _, taken in recording.of(step):
        own: list[Piece] = [(STANDS, LATE, what, begin - zero, end - zero) for what, _, begin, end in taken.waits]
        for block in taken.blocks:
            call, begin, end = block.call, block.begin - zero, block.end - zero
            if call.computes:
                own.append((COMPUTE, call.phase or "other", call.label, begin, end))
                continue
            kind, waited = block.collective.kind if block.collective else call.kind, late(block, came)[1]
            if waited:
                own.append((STANDS, LATE, call.label, begin, begin + waited))
            own.append((STANDS, kind, call.label, begin + waited, end))
        rows.append(own)
    return rows


def save_picture(recording: Recording, slow: set[int], path: Path) -> None:
    """Write the picture: an .svg, .png or .pdf. slow: ranks to draw in any case, if there are more than `DRAWN`."""
    step = typical(recording)
    ranks = sorted([*sorted(slow), *(r.rank for r in recording.ranks if r.rank not in slow)][:DRAWN])
    each = pieces(recording, step)
    seconds = max(end for rank in ranks for *_, end in each[rank])
    rows: Rows = {}
    for rank in ranks:
        for stream, title in ((COMPUTE, "computes"), (STANDS, "stands still")):
            blocks = [(kind, begin, end) for of, kind, _, begin, end in each[rank] if of == stream]
            rows[f"rank {rank} {title}"] = row(blocks, seconds)
    drawn: list[Panel] = [(f"measured: step {step}", seconds, rows)]
    for title, predicted, panel_rows in recording.predicted.get("panels", ()):
        drawn.append((f"simulated: {title}", predicted, panel_rows))
    draw(drawn, path)


def save_timeline(recording: Recording, path: Path) -> None:
    """Write the typical step for https://ui.perfetto.dev and chrome://tracing."""
    events: list[dict[str, Any]] = names(range(len(recording.ranks)), [COMPUTE, STANDS])
    for rank, own in enumerate(pieces(recording, typical(recording))):
        events += list(_events(rank, own))
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def _events(rank: int, own: list[Piece]) -> Iterator[dict[str, Any]]:
    for stream, kind, label, begin, end in own:
        yield event(rank, (COMPUTE, STANDS).index(stream), label, begin, end - begin, kind, {})
