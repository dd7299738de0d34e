"""A schedule as text: one line per pipeline device, one column per time step.

    device 0  0123.aa4bb5cc
    device 1  .0a1b2c3d4e5f

Digits are forward passes of microbatches (modulo 10), letters their backward passes, `+` gradients of weights if the
backward pass is split, and dots idle time.
"""

from __future__ import annotations

from string import ascii_lowercase
from typing import TYPE_CHECKING

from tutti.plan.pipeline.list_schedule import EQUAL
from tutti.plan.pipeline.slots import Slot, clock

if TYPE_CHECKING:
    from tutti.plan.plan import Plan

WIDE = 100  # columns
ROUNDS = 3  # maximum number of microbatches to draw, as a multiple of the devices
MOST = 16  # maximum number of devices to draw; of more, the first and last few are drawn


def drawn(plan: Plan) -> list[str]:
    """The first microbatches of a plan's pipeline, to scale if durations are known."""
    count = plan.pipe.devices
    microbatches = min(plan.accumulate, ROUNDS * count)
    durations = plan.durations or (EQUAL,) * plan.pipe.stages
    schedule = plan.pipe.of(microbatches, durations)
    times = clock(schedule, durations)
    column = max(end for _, end in times.values()) / WIDE
    lines = []
    for d, slots in enumerate(schedule.devices):
        line = ["."] * WIDE
        for slot in slots:
            begin, end = (round(t / column) for t in times[slot])
            line[begin:end] = _letter(slot) * (end - begin)
        lines.append(f"device {d:<3} {''.join(line)}")
    if count > MOST:
        lines = [*lines[: MOST // 2], "...", *lines[-MOST // 2 :]]
    more = f"the first {microbatches} of {plan.accumulate} microbatches; " if microbatches < plan.accumulate else ""
    return [*lines, f"{more}digits: forward passes, letters: backward, +: gradients of weights, dots: idle"]


def _letter(slot: Slot) -> str:
    i = slot.microbatch % 10
    return {"F": str(i), "B": ascii_lowercase[i], "W": "+"}[slot.kind]
