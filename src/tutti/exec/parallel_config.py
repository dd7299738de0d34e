"""The options of `tutti.parallelize`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tutti.analysis.passes import check_level
from tutti.exec.kernels.gradual import AUTO
from tutti.hardware import Cluster
from tutti.plan.layouts.layout import Mesh
from tutti.plan.layouts.pin import Pin
from tutti.plan.plan import Plan
from tutti.plan.textbook import NAMES
from tutti.tracing.capture import Loss


@dataclass(frozen=True)
class ParallelConfig:
    """The options of `parallelize`, where they are described."""

    loss: Loss | None
    cluster: Cluster | str
    plan: Plan | str | Path
    level: str
    clip_norm: float | None
    accumulate: int | Literal["auto"]
    fp32_master_weights: bool
    stochastic_rounding: bool
    pins: Iterable[Pin] | None
    mesh: Mesh | None
    budget: float
    recompute: Collection[str]
    seed: int
    memory: float | str | None
    folder: str | Path | None
    max_nonfinite_steps: int | None
    metrics: Mapping[str, str] | Iterable[str]

    def __post_init__(self) -> None:
        accumulate, most = self.accumulate, self.max_nonfinite_steps
        if accumulate != "auto" and not (isinstance(accumulate, int) and accumulate >= 1):
            raise ValueError(f"accumulate is {accumulate!r}; it must be a whole number, at least 1, or 'auto'")
        if not isinstance(self.plan, Plan | str | Path):
            raise ValueError(f"plan is {self.plan!r}; it may be {NAMES}, the path of a saved plan, or a tutti.Plan")
        if most is not None and not (isinstance(most, int) and most >= 0):
            raise ValueError(f"max_nonfinite_steps is {most!r}; it must be a whole number of steps, or None")
        check_level(self.level, AUTO)
