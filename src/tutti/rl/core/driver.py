"""The driver loop: everything that learns by iterations runs in `drive`.

| learner | one iteration |
|---|---|
| `Agent`, `Population` | acts and learns |
| `Placed` | one round of all ranks, or what one rank does in it |
| `job.train` | a call of `Placed.learn` up to the next report |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Learner(Protocol):
    """What counts its environment steps. Offline algorithms count updates instead."""

    num_timesteps: int


def drive(learner: Learner, end: int, step: Callable[[], Any], after: Callable[[], bool | None] | None = None) -> None:
    """Call `step` until the learner's `num_timesteps` reach `end`.

    after: called after each iteration; the loop ends when it returns False.
    """
    while learner.num_timesteps < end:
        step()
        if after is not None and after() is False:
            return
