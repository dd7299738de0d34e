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


def panels(run: DryRun) -> list[Panel]:
    """The panels of a simulated step."""
    if not isinstance(run, PipelineDryRun):
        return [(part.title, part.simulation.seconds, _rows(part.simulation)) for part in run.parts]
    rows: Rows = {f"device {d}": defaultdict(list) for d in range(len(run.memories))}
    for span in run.spans:
        if span.work:
            rows[f"device {span.device}"][span.work].append((span.begin, span.end))
    whole = ("a step", run.seconds, rows)
    begins = sorted(begin for blocks in next(iter(rows.values())).values() for begin, _ in blocks)
    return [_start(rows, begins[FIRST]), whole] if len(begins) > MANY else [whole]


def _start(rows: Rows, seconds: float) -> Panel:
    """The blocks of the first so many seconds."""
    first = {name: {kind: [(begin, min(end, seconds)) for begin, end in times if begin < seconds]
                    for kind, times in blocks.items()} for name, blocks in rows.items()}  # fmt: skip
    return "how it begins", seconds, first


def _rows(simulation: Simulation) -> Rows:
    """The times by rank and stream, then by kind or phase."""
    rows: Rows = {}
    for rank in simulation.ranks:
        streams = list(dict.fromkeys([COMPUTE, *(task.stream for task in simulation.tasks[rank])]))
        for stream in streams:
            name = f"rank {rank} {'computes' if stream == COMPUTE else stream}"
            spans = [s for s in simulation.spans if s.rank == rank and simulation.task(s).stream == stream]
            blocks = [(simulation.task(s).kind or simulation.task(s).phase or "other", s.begin, s.end) for s in spans]
            rows[name] = row(blocks, simulation.seconds)
    return rows


def row(blocks: Iterable[tuple[str, float, float]], seconds: float) -> dict[str, list[tuple[float, float]]]:
    """The times of blocks (kind, begin, end) by kind. Blocks too close to distinguish are merged."""
    times_by_kind: dict[str, list[tuple[float, float]]] = defaultdict(list)
    last = ""
    for kind, begin, end in sorted(blocks, key=lambda block: block[1]):
        times = times_by_kind[kind]
        if times and kind == last and begin - times[-1][1] <= seconds / RESOLUTION:
            times[-1] = times[-1][0], end
        else:
            times.append((begin, end))
        last = kind
    return dict(times_by_kind)
