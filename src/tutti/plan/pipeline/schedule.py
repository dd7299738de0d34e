"""Pipeline schedules: the slots that each device computes, in order.

A slot is the work of one stage for one microbatch: the forward pass (`F`), the backward pass (`B`) or, if the backward
pass is split, the gradients of weights (`W`), on which no other stage depends. With p devices, m microbatches, and v
stages per device:

 name | devices and stages | bubble, as a share of the work | in flight on the first device |
---|---|---|---|
 `gpipe` | v = 1 | (p - 1) / m | m |
 `1f1b` | v = 1 | (p - 1) / m | min(p, m) |
 `interleaved` | stage s on device s mod p; m a multiple of p | (p - 1) / (v m) | (p - 1) / v more than `1f1b` |
 `zb-h1` | v = 1, split backward pass | about half of `1f1b` if F, B and W take equally long | p |
 `zb-v` | v = 2, stages s and 2p - 1 - s on device s, split | about 0 if they take equally long | p |
 `dualpipev` | v = 2, stages as `zb-v`; pairs of F and B run together | (p - 1) / m | 2p + 1 |
 `seq1f1b` | v = 1, n chunks of the sequence, the last backward first | (p - 1) / (n m) | about 1 + (p - 1) / n |
 `auto` | as `zb-h1` (v = 1) or `zb-v` (v = 2), for stages of unequal duration | the least of several orders | p |

GPipe: Huang et al. 2019. 1F1B: Narayanan et al., PipeDream, 2019; interleaved: Megatron-LM, SC 2021. Zero bubble: Qi et
al. 2023 and, for the V, 2024; here a list scheduler that never has more microbatches in flight computes their orders
(`plan.pipeline.list_schedule`). DualPipeV: github.com/deepseek-ai/DualPipe; of two slots that run together, one
computes while the other communicates. The bidirectional DualPipe of DeepSeek-V3 (arXiv 2412.19437, section 3.2.1) on p
devices is DualPipeV on p / 2 devices with twice the data parallelism. Chunks of the sequence: Li et al., TeraPipe,
2021; Sun et al., Seq1F1B, 2024.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from tutti.plan.pipeline.list_schedule import EQUAL, best_listed, listed
from tutti.plan.pipeline.slots import Durations, Schedule, Slot, clock

SPLIT = ("zb-h1", "zb-v", "auto")  # schedules with `W` slots
CHUNKED = "seq1f1b"  # the schedule that cuts the sequence into chunks
COUNTED = ("interleaved", "auto", CHUNKED)  # names followed by a number: stages per device, or chunks
PAIRED = "dualpipev"  # the schedule whose forward and backward slots run together
NAMES = ("gpipe", "1f1b", "interleaved", PAIRED, CHUNKED, *SPLIT)
IN_V = ("zb-v", PAIRED)  # schedules with stages s and 2p - 1 - s on device s
Maker = Callable[[int, int], Sequence[Sequence[Slot]]]  # (devices, microbatches) -> the slots of each device, in order


@dataclass(frozen=True)
class Registered:
    """A schedule added by `register_schedule`, which documents the fields."""

    make: Maker
    chunks: int
    split: bool
    place: Callable[[int, int], int]


REGISTERED: dict[str, Registered] = {}


def names() -> tuple[str, ...]:
    """The names of all schedules, built-in and registered."""
    return (*NAMES, *REGISTERED)


def register_schedule(
    name: str,
    *,
    chunks: int = 1,
    split: bool = False,
    place: Callable[[int, int], int] = lambda stage, devices: stage % devices,
) -> Callable[[Maker], Maker]:
    """Register a pipeline schedule, so that `plan="pp4-<name>"` runs it.

    The decorated function returns the slots of each device in order of execution:

    >>> @tutti.register_schedule("all-forward-first")
    ... def all_forward_first(devices, microbatches):
    ...     return [[Slot(kind, d, m) for kind in "FB" for m in range(microbatches)] for d in range(devices)]

    A slot, `tutti.Slot(kind, stage, microbatch)`, is the forward pass ("F") or backward pass ("B") of one stage for one
    microbatch. Each one occurs exactly once. Building a schedule for a number of devices and microbatches raises
    ValueError if a slot is missing, repeated or on the wrong device, or if devices wait for each other in a cycle.

    Args:
        name: lower-case letters (except "x", which joins the parts of a plan's name), digits and hyphens.
        chunks: stages per device. A pipeline of p devices has p * chunks stages.
        split: "B" computes the gradients of activations only, and "W" those of weights.
        place: `place(stage, devices)` returns the device of a stage.
    """
    if not re.fullmatch(r"[a-wyz0-9][a-wyz0-9-]*", name):
        raise ValueError(f"schedule {name!r}: a name is lower-case letters except 'x', digits and hyphens")
    if name in names():
        raise ValueError(f"there is a schedule {name!r} already")
    if chunks < 1:
        raise ValueError(f"schedule {name!r} has {chunks} stages on each device; at least 1 is needed")

    def enter(make: Maker) -> Maker:
        REGISTERED[name] = Registered(make, chunks, split, place)
        return make

    return enter


@dataclass(frozen=True)
class Pipe:
    """A pipeline: its number of devices, its schedule, stages per device (`chunks`), and chunks of the sequence."""

    devices: int
    schedule: str = "1f1b"
    chunks: int = 1
    sequence_chunks: int = 1

    @property
    def stages(self) -> int:
        return self.devices * self.chunks

    def of(self, microbatches: int, durations: Durations = ()) -> Schedule:
        """The schedule for this number of microbatches. Raises ValueError if the numbers do not fit the schedule."""
        return schedule_of(self.schedule, self.devices, self.stages, microbatches, durations, self.sequence_chunks)

    def __str__(self) -> str:
        schedule = "" if self.schedule == "1f1b" else f"-{self.schedule}"
        count = self.sequence_chunks if self.sequence_chunks > 1 else self.chunks
        return f"pp{self.devices}{schedule}{count if self.schedule in COUNTED else ''}"


NO_PIPE = Pipe(1)


def schedule_of(
    name: str, devices: int, stages: int, microbatches: int, durations: Durations = (), sequence_chunks: int = 1
) -> Schedule:
    """A schedule by name.

    durations: durations of the stages, for the schedule `auto`; by default all stages take equally long.
    sequence_chunks: number of chunks of the sequence.

    Raises ValueError if the name is unknown or the schedule does not allow these numbers.
    """
    p, v = devices, stages // devices
    if name not in names():
        raise ValueError(f"no schedule {name!r}; there are {', '.join(names())}")
    if stages % p or stages < p:
        raise ValueError(f"{stages} stages do not divide over {p} devices of a pipeline")
    if name in IN_V and v != 2:
        raise ValueError(f"{name} has 2 stages on each device, which makes {2 * p}, not {stages}")
    if name == PAIRED and microbatches < 2 * p:
        raise ValueError(f"{name} on {p} devices takes at least {2 * p} microbatches, not {microbatches}")
    if name == "auto" and v > 2:
        raise ValueError(f"auto has 1 or 2 stages on each device, which makes {p} or {2 * p}, not {stages}")
    if name in ("gpipe", "1f1b", CHUNKED, "zb-h1") and v != 1:
        raise ValueError(f"{name} has one stage on each device: {p}, not {stages}; interleaved has several")
    if name == "interleaved" and microbatches % p:
        raise ValueError(f"interleaved takes a multiple of {p} microbatches, not {microbatches}")
    if (name == CHUNKED) != (sequence_chunks > 1):
        raise ValueError(
            f"{name} has {'no' if sequence_chunks > 1 else 'at least two'} chunks of the sequence, "
            f"not {sequence_chunks}"
        )
    if durations and len(durations) != stages:
        raise ValueError(f"{len(durations)} durations are given for {stages} stages")
    if name in REGISTERED:
        return _registered(name, p, stages, microbatches)
    place = tuple(s % p if name == "interleaved" else min(s, 2 * p - 1 - s) for s in range(stages))
    pairs: tuple[frozenset[int], ...] = ()
    if name == PAIRED:
        units = [_in_pairs(d, p, microbatches) for d in range(p)]
        slots, pairs = [[slot for unit in mine for slot in unit] for mine in units], tuple(map(_paired, units))
    elif name == "auto":
        slots = best_listed(place, microbatches, p, tuple(map(tuple, durations)) or (EQUAL,) * stages)
    elif name in SPLIT:
        slots = listed(place, microbatches, p)
    elif name == "gpipe":
        slots = [[Slot(kind, d, m) for kind in "FB" for m in range(microbatches)] for d in range(p)]
    elif name == CHUNKED:
        slots = [_in_slices(d, p, microbatches, sequence_chunks) for d in range(p)]
    else:
        slots = [_one_each(d, p, v, microbatches) for d in range(p)]
    return Schedule(name, tuple(map(tuple, slots)), place, name in SPLIT, sequence_chunks, pairs)


def _registered(name: str, devices: int, stages: int, microbatches: int) -> Schedule:
    """A registered schedule. Raises ValueError if it cannot run."""
    registered = REGISTERED[name]
    if stages != devices * registered.chunks:
        raise ValueError(
            f"{name} has {registered.chunks} stages on each device: {devices * registered.chunks}, not {stages}"
        )
    place = tuple(registered.place(stage, devices) for stage in range(stages))
    lists = registered.make(devices, microbatches)
    if not isinstance(lists, Sequence) or not all(isinstance(mine, Sequence) for mine in lists):
        raise ValueError(f"{name}: the function must return a list of slots for each device, not {lists!r}")
    slots = tuple(map(tuple, lists))
    if any(not isinstance(device, int) or not 0 <= device < devices for device in place):
        raise ValueError(f"{name}: place must return devices from 0 to {devices - 1}, not {place}")
    if len(slots) != devices:
        raise ValueError(f"{name} gives the slots of {len(slots)} devices, not of {devices}")
    kinds = "FBW" if registered.split else "FB"
    for device, mine in enumerate(slots):
        todo = Counter(
            Slot(kind, stage, microbatch)
            for kind in kinds
            for stage in range(stages)
            for microbatch in range(microbatches)
            if place[stage] == device
        )
        for i, slot in enumerate(mine):
            if not isinstance(slot, Slot):
                raise ValueError(f"{name}: device {device}, position {i}: {slot!r} is not a tutti.Slot")
            if slot.kind not in kinds:
                raise ValueError(
                    f"{name}: device {device}, position {i}: kind {slot.kind!r}; it may be {', '.join(kinds)}"
                )
        for slot in todo - Counter(mine):
            raise ValueError(f"{name}: device {device} lacks {slot}; its {len(mine)} positions have others")
        for slot in Counter(mine) - todo:
            at = len(mine) - 1 - mine[::-1].index(slot)
            why = "again" if slot in todo else "which is no action of this device"
            raise ValueError(f"{name}: device {device} has an extra {slot} at position {at}, {why}")
    schedule = Schedule(name, slots, place, registered.split)
    clock(schedule, (EQUAL,) * stages)
    return schedule


def forward(place: Sequence[int], microbatches: int, sequence_chunks: int = 1) -> Schedule:
    """A schedule of forward passes only. place: the device of each stage."""
    each = [(m, c) for m in range(microbatches) for c in range(sequence_chunks)]
    slots = [
        [Slot("F", s, *which) for which in each for s in range(len(place)) if place[s] == d]
        for d in range(max(place) + 1)
    ]
    return Schedule("forward", tuple(map(tuple, slots)), tuple(place), sequence_chunks=sequence_chunks)


def _one_each(device: int, p: int, v: int, m: int) -> list[Slot]:
    """The slots of `1f1b` and `interleaved`: the stages of a device take turns."""
    ahead = min(m * v, p - device - 1 if v == 1 else 2 * (p - device - 1) + (v - 1) * p)

    def slot(kind: str, i: int) -> Slot:
        chunk = i // p % v if v > 1 else 0
        microbatch = i // (p * v) * p + i % p if v > 1 else i
        return Slot(kind, (chunk if kind == "F" else v - 1 - chunk) * p + device, microbatch)

    return _in_turns(ahead, [slot("F", i) for i in range(m * v)], [slot("B", i) for i in range(m * v)])


def _in_pairs(device: int, p: int, m: int) -> list[tuple[Slot, ...]]:
    """The slots of `dualpipev`, those that run together in one tuple: the order of DeepSeek's DualPipeV, with whole
    backward passes. Stages `device` (0) and `2p - 1 - device` (1) take turns."""
    stages, done, units = (device, 2 * p - 1 - device), {kind: [0, 0] for kind in "FB"}, []

    def take(*works: str) -> None:
        unit = []
        for kind, which in works:
            i = int(which)
            unit.append(Slot(kind, stages[i], done[kind][i]))
            done[kind][i] += 1
        units.append(tuple(unit))

    behind = p - 1 - device
    phases: list[tuple[int, list[tuple[str, ...]]]] = [
        (2 * behind, [("F0",)]),
        (device + 1, [("F0",), ("F1",)]),
        (behind, [("B1",), ("F1",)]),
        (m - 2 * p + device + 1, [("F0", "B1"), ("F1", "B0")]),
        (behind, [("B1",), ("F1", "B0")]),
        (device + 1, [("B1",), ("B0",)]),
        (behind, [("B0",)]),
    ]
    for count, works in phases:
        for _ in range(count):
            for work in works:
                take(*work)
    return units


def _paired(units: Sequence[tuple[Slot, ...]]) -> frozenset[int]:
    """The positions of slots that run together with the next one."""
    begins = accumulate(map(len, units), initial=0)
    return frozenset(begin for begin, unit in zip(begins, units, strict=False) if len(unit) == 2)


def _in_slices(device: int, p: int, m: int, n: int) -> list[Slot]:
    """The slots of `seq1f1b`. The forwards ahead bring the last chunk, whose backward is first, to the last device."""
    forwards = [Slot("F", device, i, c) for i in range(m) for c in range(n)]
    backwards = [Slot("B", device, i, c) for i in range(m) for c in reversed(range(n))]
    return _in_turns(min(m * n, p - device - 1 + n - 1), forwards, backwards)


def _in_turns(ahead: int, forwards: list[Slot], backwards: list[Slot]) -> list[Slot]:
    """The slots with `ahead` forwards, then forwards and backwards alternately, then the remaining backwards."""
    turns = [slot for pair in zip(forwards[ahead:], backwards, strict=False) for slot in pair]
    return [*forwards[:ahead], *turns, *backwards[len(forwards) - ahead :]]
