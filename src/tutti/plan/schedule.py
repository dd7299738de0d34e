"""Schedules of pipelines: what each device computes, in order.

A slot is the forward pass (`F`), backward pass (`B`) or, where the backward pass is split, the part of it that nobody
waits for (`W`), of one stage for one microbatch. With p devices, m microbatches, and v stages on each device:

| name | devices and stages | bubble, as a share of the work | in flight on the first device |
|---|---|---|---|
| `gpipe` | v = 1 | (p - 1) / m | m |
| `1f1b` | v = 1 | (p - 1) / m | min(p, m) |
| `interleaved` | stage s on device s mod p; m a multiple of p | (p - 1) / (v m) | as much, and (p - 1) / v more |
| `zb-h1` | v = 1, backward split | about half of that, where F, B and W take as long | p |
| `zb-v` | v = 2, stages s and 2p - 1 - s on device s, split | about none where they do | p |

GPipe: Huang et al. 2019. 1F1B: Narayanan et al., PipeDream, 2019; interleaved: Megatron-LM, SC 2021. Zero bubble: Qi et
al. 2023 and, for the V, 2024; here their orders come out of a list scheduler that never holds more microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

SPLIT = ("zb-h1", "zb-v")  # names with `W`
NAMES = ("gpipe", "1f1b", "interleaved", *SPLIT)


class Slot(NamedTuple):
    """One part of one stage for one microbatch."""

    kind: str
    stage: int
    microbatch: int


@dataclass(frozen=True)
class Schedule:
    """devices: the slots of each, in order. place: the device of each stage."""

    name: str
    devices: tuple[tuple[Slot, ...], ...]
    place: tuple[int, ...]

    @property
    def split(self) -> bool:
        return self.name in SPLIT


def schedule_of(name: str, devices: int, stages: int, microbatches: int) -> Schedule:
    """A schedule by name. Raises ValueError for numbers that do not go together."""
    p, v = devices, stages // devices
    if name not in NAMES:
        raise ValueError(f"no schedule {name!r}; there are {', '.join(NAMES)}")
    if stages % p or stages < p:
        raise ValueError(f"{stages} stages do not divide over {p} devices of a pipeline")
    if name == "zb-v" and v != 2:
        raise ValueError(f"zb-v has 2 stages on each device, which makes {2 * p}, not {stages}")
    if name not in ("interleaved", "zb-v") and v != 1:
        raise ValueError(f"{name} has one stage on each device: {p}, not {stages}; interleaved has several")
    if name == "interleaved" and microbatches % p:
        raise ValueError(f"interleaved takes a multiple of {p} microbatches, not {microbatches}")
    place = tuple(min(s, 2 * p - 1 - s) if name == "zb-v" else s % p for s in range(stages))
    if name in SPLIT:
        slots = _listed(place, p, microbatches, most=p * v)
    elif name == "gpipe":
        slots = [[Slot(kind, d, m) for kind in "FB" for m in range(microbatches)] for d in range(p)]
    else:
        slots = [_one_each(d, p, v, microbatches) for d in range(p)]
    return Schedule(name, tuple(map(tuple, slots)), place)


def forward(place: Sequence[int], microbatches: int) -> Schedule:
    """Forward passes alone, with stages on these devices."""
    slots = [
        [Slot("F", s, m) for m in range(microbatches) for s in range(len(place)) if place[s] == d]
        for d in range(max(place) + 1)
    ]
    return Schedule("forward", tuple(map(tuple, slots)), tuple(place))


def _one_each(device: int, p: int, v: int, m: int) -> list[Slot]:
    """Some forwards ahead, then one forward and one backward in turns, then the backwards that are left."""
    ahead = min(m * v, p - device - 1 if v == 1 else 2 * (p - device - 1) + (v - 1) * p)

    def slot(kind: str, i: int) -> Slot:
        chunk = i // p % v if v > 1 else 0
        microbatch = i // (p * v) * p + i % p if v > 1 else i
        return Slot(kind, (chunk if kind == "F" else v - 1 - chunk) * p + device, microbatch)

    slots = [slot("F", i) for i in range(ahead)]
    for i in range(ahead, m * v):
        slots += [slot("F", i), slot("B", i - ahead)]
    return slots + [slot("B", i) for i in range(m * v - ahead, m * v)]


def waits(slot: Slot, stages: int) -> list[Slot]:
    """The slots that have to be over before one can begin, of those that its own device does not put before it."""
    kind, stage, m = slot
    if kind == "F":
        return [Slot("F", stage - 1, m)] if stage else []
    if kind == "W":
        return [Slot("B", stage, m)]
    return [Slot("F", stage, m)] + ([Slot("B", stage + 1, m)] if stage + 1 < stages else [])


def _listed(place: Sequence[int], p: int, m: int, most: int) -> list[list[Slot]]:
    """Slots as they come if each takes as long: backward passes first, then forward ones, then what nobody waits for.

    most: microbatches of a stage, together, that a device may hold until their backward pass is wholly over.
    """
    stages = len(place)
    mine = [[s for s in range(stages) if place[s] == d] for d in range(p)]
    next_of = {(kind, s): 0 for kind in "FBW" for s in range(stages)}
    over: dict[Slot, float] = {}
    free, slots = [0.0] * p, [[] for _ in range(p)]

    def ready(slot: Slot) -> float:
        return max((over.get(x, float("inf")) for x in waits(slot, stages)), default=0.0)

    def candidates(d: int) -> list[tuple[float, int, int, Slot]]:
        held = sum(next_of["F", s] - next_of["W", s] for s in mine[d])
        found = []
        for s in mine[d]:
            for rank, kind in enumerate("BFW"):
                slot = Slot(kind, s, next_of[kind, s])
                if slot.microbatch == m or (kind == "F" and held >= most):
                    continue
                begin = max(free[d], ready(slot))
                if begin < float("inf"):
                    found.append((begin, rank, -s, slot))
        return found

    for _ in range(3 * m * stages):
        begin, *_, slot, d = min((*min(found), d) for d in range(p) if (found := candidates(d)))
        over[slot] = free[d] = begin + 1
        next_of[slot.kind, slot.stage] += 1
        slots[d].append(slot)
    return slots
