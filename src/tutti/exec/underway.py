"""Collectives under way: what `torch.distributed` has begun for this rank, and what is still to be done at the end.

`Work.wait` lets a Gloo rank stand still until the collective is over; NCCL lets the device's queue do that, and the
process goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tutti.launch.heartbeat import Meeting


@dataclass
class UnderWay:
    """works: what the backend does. result: where it writes. held: what it reads. finish: what becomes of the result
    when all is there. meeting: what is under way."""

    works: Sequence[Any]
    result: torch.Tensor
    held: torch.Tensor
    finish: Callable[[torch.Tensor], torch.Tensor] | None = None
    meeting: Meeting | None = None

    def over(self) -> torch.Tensor:
        """The result of the collective, when it is there."""
        for work in self.works:
            work.wait()
        return self.result if self.finish is None else self.finish(self.result)
