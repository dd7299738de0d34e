"""The rows of a simulated step. Per rank, one row for computation and one for each axis it communicates over; for a
pipeline, one row per device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from tutti.sim.pipeline import PipelineDryRun
from tutti.sim.simulate import Simulation
from tutti.sim.step import DryRun
from tutti.sim.tasks import COMPUTE

RESOLUTION = 4000  # blocks closer than the length over this are drawn as one
MANY = 120  # blocks of a pipeline device, of which the first are drawn a second time, larger
FIRST = 60  # of them

Rows = dict[str, dict[str, list[tuple[float, float]]]]  # row -> kind of work -> (begin, end)
Panel = tuple[str, float, Rows]  # title, seconds, rows


def panels(made: DryRun) -> list[Panel]:
    """The panels of a simulated step."""
    if not isinstance(made, PipelineDryRun):
        return [(part.title, part.simulation.seconds, _rows(part.simulation)) for part in made.parts]
    rows: Rows = {f"device {d}": defaultdict(list) for d in range(len(made.memories))}
    for span in made.spans:
        if span.work:
            rows[f"device {span.device}"][span.work].append((span.begin, span.end))
    whole = ("a step", made.seconds, rows)
    begins = sorted(begin for blocks in next(iter(rows.values())).values() for begin, _ in blocks)
    return [_start(rows, begins[FIRST]), whole] if len(begins) > MANY else [whole]


def _start(rows: Rows, seconds: float) -> Panel:
    """The blocks of the first so many seconds."""
    first = {name: {kind: [(begin, min(end, seconds)) for begin, end in held if begin < seconds]
                    for kind, held in blocks.items()} for name, blocks in rows.items()}  # fmt: skip
    return "how it begins", seconds, first


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
