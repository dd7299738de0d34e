"""Slots: units of work in a pipeline, their dependencies, and their times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

# For each stage the seconds of F, B and W for one microbatch, and of the transfer between it and the next stage, if
# that is on another device.
Durations = Sequence[Sequence[float]]


class Slot(NamedTuple):
    """A unit of work in a pipeline.

    kind: "F" (forward), "B" (backward) or "W" (gradients of weights, if the backward pass is split).
    stage, microbatch: the stage and the microbatch of the work.
    slice: chunk of the sequence.
    """

    kind: str
    stage: int
    microbatch: int
    slice: int = 0


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule.

    devices: the slots of each device, in order.
    place: the device of each stage.
    split: whether there are `W` slots.
    sequence_chunks: number of chunks of the sequence.
    pairs: for each device the positions of slots that run together with the next one: one computes while the other
        communicates. None if there are none.
    """

    name: str
    devices: tuple[tuple[Slot, ...], ...]
    place: tuple[int, ...]
    split: bool = False
    sequence_chunks: int = 1
    pairs: tuple[frozenset[int], ...] = ()

    def units(self, device: int) -> list[tuple[Slot, ...]]:
        """The slots of a device, those that run together in one tuple."""
        slots, units = self.devices[device], []
        paired = self.pairs[device] if self.pairs else frozenset()
        i = 0
        while i < len(slots):
            width = 2 if i in paired else 1
            units.append(slots[i : i + width])
            i += width
        return units


def waits(slot: Slot, stages: int) -> list[Slot]:
    """The slots that must end before this one begins, except those implied by the order of its own device."""
    kind, stage, *rest = slot
    if kind == "F":
        return [Slot("F", stage - 1, *rest)] if stage else []
    if kind == "W":
        return [Slot("B", stage, *rest)]
    return [Slot("F", stage, *rest)] + ([Slot("B", stage + 1, *rest)] if stage + 1 < stages else [])


def taking(slot: Slot, durations: Durations, split: bool, sequence_chunks: int = 1) -> float:
    """Seconds of a slot. A backward pass that is not split includes W. Chunks take equally long."""
    forward, backward, rest, _ = durations[slot.stage]
    return {"F": forward, "B": backward if split else backward + rest, "W": rest}[slot.kind] / sequence_chunks


def ready(
    slot: Slot, over: Mapping[Slot, float], durations: Durations, place: Sequence[int], sequence_chunks: int = 1
) -> float:
    """The time at which all dependencies of a slot are available; infinite if one has not ended yet."""
    latest = 0.0
    for x in waits(slot, len(place)):
        way = durations[min(x.stage, slot.stage)][3] / sequence_chunks if place[x.stage] != place[slot.stage] else 0.0
        latest = max(latest, over.get(x, inf) + way)
    return latest


def clock(schedule: Schedule, durations: Durations) -> dict[Slot, tuple[float, float]]:
    """(begin, end) of each slot, in seconds. Slots that run together begin and end together.

    Raises ValueError if devices wait for one another in a cycle.
    """
    over: dict[Slot, float] = {}
    times: dict[Slot, tuple[float, float]] = {}
    units = [schedule.units(d) for d in range(len(schedule.devices))]
    at, free = [0] * len(units), [0.0] * len(units)
    chunks, going = schedule.sequence_chunks, True
    while going:
        going = False
        for d, todo in enumerate(units):
            while (
                at[d] < len(todo)
                and (there := max(ready(slot, over, durations, schedule.place, chunks) for slot in todo[at[d]])) < inf
            ):
                begin = max(free[d], there)
                free[d] = begin + sum(taking(slot, durations, schedule.split, chunks) for slot in todo[at[d]])
                for slot in todo[at[d]]:
                    over[slot], times[slot] = free[d], (begin, free[d])
                at[d], going = at[d] + 1, True
    if stuck := [(d, i, units[d][i][0]) for d, i in enumerate(at) if i < len(units[d])]:
        said = ", ".join(f"device {d} at position {i}, {slot}" for d, i, slot in stuck)
        raise ValueError(f"the schedule {schedule.name} cannot run: devices wait for one another: {said}")
    return times


def makespan(schedule: Schedule, durations: Durations) -> float:
    """Seconds until all slots have ended."""
    return max(end for _, end in clock(schedule, durations).values())


def in_flight(schedule: Schedule) -> list[list[float]]:
    """The microbatches in flight of each stage on each device, at the time when the device has most in total."""
    last, in_flight_of_devices = "W" if schedule.split else "B", []
    for slots in schedule.devices:
        counts, most = [0] * len(schedule.place), [0] * len(schedule.place)
        now = peak = 0
        for kind, stage, *_ in slots:
            if kind == "F":
                counts[stage] += 1
                now += 1
                if now > peak:
                    peak, most = now, list(counts)
            elif kind == last:
                counts[stage] -= 1
                now -= 1
        in_flight_of_devices.append([count / schedule.sequence_chunks for count in most])
    return in_flight_of_devices
