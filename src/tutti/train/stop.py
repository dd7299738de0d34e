"""Stop a run between two steps, at the same step on all ranks."""

import signal
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from tutti.launch import interrupt
from tutti.launch.heartbeat import HEARTBEAT


class StopSignal:
    """Records SIGINT and SIGTERM instead of exiting, from the first call of `agreed()` on.

    Until then, while the first step is prepared, they end the process as usual; an interrupt that code of torch has
    swallowed counts as received.
    """

    def __init__(self) -> None:
        self._received = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agreed(self) -> int:
        """The signal that some rank received, the same number on every rank; 0 for none.

        Collective: every rank must call it, at the same step.
        """
        if not self._before:
            self._before = {n: signal.signal(n, self._note) for n in (signal.SIGINT, signal.SIGTERM)}
            self._received = signal.SIGINT if interrupt.received else 0
        if not (dist.is_available() and dist.is_initialized()):
            return self._received
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        highest = torch.tensor([self._received], device=device)
        with HEARTBEAT.within("all_reduce", "signals received"):
            dist.all_reduce(highest, dist.ReduceOp.MAX)
        return int(highest.item())

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = number
