"""Random stages of a step, and plans with them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tutti.hardware import Cluster
from tutti.ir.step_graph import FORWARD, StepGraph
from tutti.plan.pipeline.reads import Reads
from tutti.plan.pipeline.slots import Durations, Schedule, makespan, taking
from tutti.plan.plan import Plan
from tutti.plan.planner import Planner
from tutti.plan.textbook import parse_name
from tutti.tracing.function import capture_function
from tutti.tracing.holdings import Holdings


def function_graph(function: Callable, *args: Any, **objects: Any) -> StepGraph:
    """The graph of a function of a store with these objects."""
    return capture_function(function, args, {}, Holdings(objects, False)).graph


def random_stages(graph: StepGraph, count: int, seed: int) -> dict[str, int]:
    """A stage for every forward node: the pass is cut at places drawn at random."""
    forward = [n for n in Reads(graph).calls if n.meta["phase"] == FORWARD]
    starts = sorted(random.Random(seed).sample(range(1, len(forward)), count - 1))
    named = {n.meta["name"]: sum(start <= i for start in starts) for i, n in enumerate(forward)}
    return {name: stage for name, stage in named.items() if "getitem" not in name}


def pipeline(
    graph: StepGraph, stages: dict[str, int], devices: int, schedule: str, inner: str, accumulate: int
) -> Plan:
    """A pipeline of a textbook plan on the CPU; `inner` is its name and how many devices it has, as in "dp2"."""
    wide = int(inner[-1])
    planner = Planner(graph, Cluster.parse(f"cpu:{wide}"), (), accumulate)
    plan = planner.textbook(parse_name(inner, wide)).plan() if wide > 1 else planner.on({"dp": 1}).plan()
    mesh = {"pp": devices, **{axis: n for axis, n in plan.mesh.items() if n > 1}}
    return plan.replace(
        mesh=mesh,
        stages=stages,
        schedule=schedule,
        sequence_chunks=graph.sequence_chunks,
        name="",
        cluster="",
        prediction=None,
    )


def bubble(schedule: Schedule, durations: Durations) -> float:
    """The time in which the busiest device has nothing to do, as a share of that in which it has."""
    busy = max(
        sum(taking(slot, durations, schedule.split, schedule.sequence_chunks) for slot in slots)
        for slots in schedule.devices
    )
    return (makespan(schedule, durations) - busy) / busy
