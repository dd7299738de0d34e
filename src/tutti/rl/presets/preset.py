"""What a preset is: options under which an algorithm is known to learn an environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Preset:
    """algorithm: the name of its class. env: a name for `tutti.rl.make`. steps: of learning.

    threshold: mean return of an episode that it reaches within them, with seeds 0, 1 and 2. options: fields of the
    algorithm's `Config`. data: a data set to learn from, for offline algorithms.
    """

    algorithm: str
    env: str
    steps: int
    threshold: float
    options: dict[str, Any] = field(default_factory=dict)
    data: str = ""
