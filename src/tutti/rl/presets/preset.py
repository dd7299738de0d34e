"""The fields of a preset."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Preset:
    """An algorithm with options that are known to work on an environment.

    steps: number of steps to learn for. threshold: the mean return of an episode (of an agent, where there are several)
    that it reaches with the seeds 0, 1 and 2. data: how the data of an offline algorithm are made
    (`tutti.rl.offline_data`).
    """

    algorithm: str
    env: str
    steps: int
    threshold: float
    options: dict[str, Any] = field(default_factory=dict)
    data: str = ""
