"""Collectives in flight: what `torch.distributed` has started for this rank, and what remains to be done at the end.

`Work.wait` blocks a Gloo rank until the collective is complete. With NCCL, the device's stream waits and the process
continues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tutti.launch.heartbeat import Meeting


@dataclass
class UnderWay:
    """A collective in flight.

    works: handles of the backend. result: the tensor that it writes. operand: the tensor that it reads. finish: applied
    to the result at the end. meeting: what a watchdog reports about it.
    """

    works: Sequence[Any]
    result: torch.Tensor
    operand: torch.Tensor
    finish: Callable[[torch.Tensor], torch.Tensor] | None = None
    meeting: Meeting | None = None

    def over(self) -> torch.Tensor:
        """Wait for the collective and return its result."""
        for work in self.works:
            work.wait()
        return self.result if self.finish is None else self.finish(self.result)
