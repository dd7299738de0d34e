"""Random stages of a step, and plans with them."""

from __future__ import annotations

import random
from collections.abc import Callable

from tutti.cluster import Cluster
from tutti.graph.step_graph import FORWARD, StepGraph
from tutti.plan.plan import Plan
from tutti.plan.planner import Planner
from tutti.plan.schedule import Schedule, Slot, waits
from tutti.plan.stages import Reads


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
    plan = planner.named(inner) if wide > 1 else planner.on({"dp": 1}).plan()
    mesh = {"pp": devices, **{axis: n for axis, n in plan.mesh.items() if n > 1}}
    return plan.replace(mesh=mesh, stages=stages, schedule=schedule, name="", cluster="", prediction=None)


Durations = Callable[[Slot], float]


def times(schedule: Schedule, seconds: Durations) -> dict[Slot, tuple[float, float]]:
    """(begin, end) of each slot.

    Raises ValueError where devices wait for one another in a circle.
    """
    stages = len(schedule.place)
    made: dict[Slot, tuple[float, float]] = {}
    at, free = [0] * len(schedule.devices), [0.0] * len(schedule.devices)
    going = True
    while going:
        going = False
        for d, slots in enumerate(schedule.devices):
            while at[d] < len(slots) and all(x in made for x in waits(slots[at[d]], stages)):
                slot = slots[at[d]]
                begin = max([free[d], *(made[x][1] for x in waits(slot, stages))])
                made[slot] = begin, begin + seconds(slot)
                free[d], at[d], going = made[slot][1], at[d] + 1, True
    if any(at[d] < len(slots) for d, slots in enumerate(schedule.devices)):
        raise ValueError(f"the schedule {schedule.name} cannot run: devices wait for one another")
    return made


def bubble(schedule: Schedule, seconds: Durations) -> float:
    """The time in which the busiest device has nothing to do, as a share of that in which it has."""
    made = times(schedule, seconds)
    busy = max(sum(seconds(slot) for slot in slots) for slots in schedule.devices)
    return (max(end for _, end in made.values()) - busy) / busy


def in_flight(schedule: Schedule, device: int) -> int:
    """The most microbatches of stages that a device holds at once."""
    last, held, most = "W" if schedule.split else "B", 0, 0
    for slot in schedule.devices[device]:
        held += slot.kind == "F"
        most = max(most, held)
        held -= slot.kind == last
    return most
