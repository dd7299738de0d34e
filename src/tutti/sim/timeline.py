"""A simulated step as a trace for https://ui.perfetto.dev and chrome://tracing.

Chrome's trace event format: complete events ("X") with begin and duration in microseconds; one process per rank, with
a thread for computation, one for each mesh axis, and a counter of its memory. Events are named by label, so the layers
of a model share names.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tutti.analysis.memory import platform, walk
from tutti.sim.pipeline import PipelineDryRun
from tutti.sim.simulate import Simulation
from tutti.sim.step import DryRun
from tutti.sim.tasks import COMPUTE

MICRO = 1e6


def timeline(run: DryRun) -> dict[str, Any]:
    """The trace of a step. Of equal microbatches the first is shown, the others are one block. For a pipeline, each
    action of each device."""
    summary = {"seconds": run.seconds, "fraction_of_peak": run.fraction_of_peak, "cluster": str(run.cluster)}
    if isinstance(run, PipelineDryRun):
        head = names(range(len(run.memories)), [COMPUTE], "device")
        events = [block(s.device, 0, s.name, s.begin, s.end - s.begin, s.work, {}) for s in run.spans if s.work]
        return {"traceEvents": head + events, "displayTimeUnit": "ms", "otherData": summary}
    events: list[dict[str, Any]] = []
    at = 0.0
    streams = list(dict.fromkeys(s for part in run.parts for s in _streams(part.simulation)))
    for part in run.parts:
        events += spans(part.simulation, streams, at)
        events += memory_counter(part.simulation, run, at)
        once = part.simulation.seconds
        if part.runs > 1:
            name = f"{part.runs - 1} more of {part.name}"
            for rank in part.simulation.ranks:
                events.append(block(rank, 0, name, at + once, (part.runs - 1) * once, "folded", {}))
        at += part.seconds
    head = names(run.parts[0].simulation.ranks, streams)
    return {"traceEvents": head + events, "displayTimeUnit": "ms", "otherData": summary}


def save_timeline(run: DryRun, path: Path) -> None:
    path.write_text(json.dumps(timeline(run)) + "\n")


def names(ranks: Sequence[int], streams: Sequence[str], called: str = "rank") -> list[dict[str, Any]]:
    """Metadata events: names and order of processes and threads."""
    events = []
    for rank in ranks:
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"{called} {rank}"}})
        for i, stream in enumerate(streams):
            title = stream if stream == COMPUTE else f"communicate over {stream}"
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": i, "args": {"name": title}})
            events.append({"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": i, "args": {"sort_index": i}})
    return events


def spans(simulation: Simulation, streams: Sequence[str], at: float) -> list[dict[str, Any]]:
    """A complete event for each task, shifted by `at` seconds."""
    threads = {stream: i for i, stream in enumerate(streams)}
    events = []
    for span in simulation.spans:
        task = simulation.task(span)
        more: dict[str, Any] = {"phase": task.phase, "bytes": task.bytes}
        if task.flops:
            more["flops"] = task.flops
        if not task.kind and task.event >= 0:
            more["operators"] = [str(n.target) for n in simulation.replays[span.rank].events[task.event].nodes]
        name = f"{task.kind} {task.name}" if task.kind else task.name
        kind = task.kind or task.phase
        events.append(block(span.rank, threads[task.stream], name, at + span.begin, span.end - span.begin, kind, more))
    return events


def memory_counter(simulation: Simulation, run: DryRun, at: float) -> list[dict[str, Any]]:
    """The live bytes during each task."""
    on, events = platform(run.cluster.device), []
    for rank in simulation.ranks:
        alive = [total for total, *_ in walk(simulation.replays[rank], on)]
        beside = simulation.memory[rank].peak - max(alive, default=0)
        for span in sorted((s for s in simulation.spans if s.rank == rank), key=lambda s: s.begin):
            event = simulation.task(span).event
            if event >= 0:
                counted = {"bytes": alive[event] + beside}
                when = (at + span.begin) * MICRO
                events.append({"ph": "C", "name": "memory", "pid": rank, "tid": 0, "ts": when, "args": counted})
    return events


def _streams(simulation: Simulation) -> list[str]:
    return list(dict.fromkeys([COMPUTE, *(simulation.task(span).stream for span in simulation.spans)]))


def block(rank: int, thread: int, name: str, begin: float, took: float, kind: str, more: dict) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name or "unnamed",
        "cat": kind or "other",
        "pid": rank,
        "tid": thread,
        "ts": begin * MICRO,
        "dur": took * MICRO,
        "args": more,
    }
