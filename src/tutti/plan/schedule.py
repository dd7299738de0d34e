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
| `found` | as `zb-h1`, or with v = 2 as `zb-v`, for stages that take unequally long | the least of several orders | p |

GPipe: Huang et al. 2019. 1F1B: Narayanan et al., PipeDream, 2019; interleaved: Megatron-LM, SC 2021. Zero bubble: Qi et
al. 2023 and, for the V, 2024; here their orders come out of a list scheduler that never holds more microbatches
(`plan.list_schedule`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tutti.plan.list_schedule import EQUAL, found, listed
from tutti.plan.slots import Durations, Schedule, Slot

SPLIT = ("zb-h1", "zb-v", "found")  # names with `W`
COUNTED = ("interleaved", "found")  # names that are followed by the number of stages on each device
NAMES = ("gpipe", "1f1b", "interleaved", *SPLIT)


@dataclass(frozen=True)
class Pipe:
    """How many devices a pipeline has, the name of its schedule, and how many stages each device has."""

    devices: int
    schedule: str = "1f1b"
    chunks: int = 1

    @property
    def stages(self) -> int:
        return self.devices * self.chunks

    def of(self, microbatches: int, durations: Durations = ()) -> Schedule:
        """Raises ValueError for numbers that do not go together."""
        return schedule_of(self.schedule, self.devices, self.stages, microbatches, durations)

    def __str__(self) -> str:
        schedule = "" if self.schedule == "1f1b" else f"-{self.schedule}"
        return f"pp{self.devices}{schedule}{self.chunks if self.schedule in COUNTED else ''}"


NO_PIPE = Pipe(1)


def schedule_of(name: str, devices: int, stages: int, microbatches: int, durations: Durations = ()) -> Schedule:
    """A schedule by name. durations: of the stages, which `found` goes by; by default all take as long.

    Raises ValueError for numbers that do not go together.
    """
    p, v = devices, stages // devices
    if name not in NAMES:
        raise ValueError(f"no schedule {name!r}; there are {', '.join(NAMES)}")
    if stages % p or stages < p:
        raise ValueError(f"{stages} stages do not divide over {p} devices of a pipeline")
    if name == "zb-v" and v != 2:
        raise ValueError(f"zb-v has 2 stages on each device, which makes {2 * p}, not {stages}")
    if name == "found" and v > 2:
        raise ValueError(f"found has 1 or 2 stages on each device, which makes {p} or {2 * p}, not {stages}")
    if name in ("gpipe", "1f1b", "zb-h1") and v != 1:
        raise ValueError(f"{name} has one stage on each device: {p}, not {stages}; interleaved has several")
    if name == "interleaved" and microbatches % p:
        raise ValueError(f"interleaved takes a multiple of {p} microbatches, not {microbatches}")
    if durations and len(durations) != stages:
        raise ValueError(f"{len(durations)} durations are given for {stages} stages")
    place = tuple(s % p if name == "interleaved" else min(s, 2 * p - 1 - s) for s in range(stages))
    if name == "found":
        slots = found(place, microbatches, p, tuple(map(tuple, durations)) or (EQUAL,) * stages)
    elif name in SPLIT:
        slots = listed(place, microbatches, p)
    elif name == "gpipe":
        slots = [[Slot(kind, d, m) for kind in "FB" for m in range(microbatches)] for d in range(p)]
    else:
        slots = [_one_each(d, p, v, microbatches) for d in range(p)]
    return Schedule(name, tuple(map(tuple, slots)), place, name in SPLIT)


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
