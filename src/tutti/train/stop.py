"""Stop a run between two steps, at the same step on all ranks."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl

from tutti.launch import interrupt
from tutti.launch.heartbeat import HEARTBEAT
from tutti.launch.launch import Interrupted, rank

if TYPE_CHECKING:
    from tutti.train.trainer.trainer import Trainer


class StopSignal:
    """Records SIGINT and SIGTERM instead of exiting, from the first call of `agreed()` on.

    Until then, while the first step is prepared, they end the process as usual; an interrupt that code of torch has
    swallowed counts as received.
    """

    def __init__(self) -> None:
        self._received = 0
        self._before: dict[int, Callable | int | None] = {}  # handlers

    def __enter__(self) -> StopSignal:
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


class StopAtSignal(TrainerCallback):
    """Stops a Trainer after the step in which some rank gets SIGINT or SIGTERM, with a checkpoint."""

    def __init__(self, stop: StopSignal):
        self.stop, self.signal = stop, 0

    def on_step_end(self, args: object, state: object, control: TrainerControl, **kwargs: object) -> None:
        self.signal = self.stop.agreed()
        if self.signal:
            control.should_save = control.should_training_stop = True


def train_until_stopped(trainer: Trainer, resume: bool) -> None:
    """Call `trainer.train`. Raises Interrupted after a signal, once a checkpoint is saved."""
    with StopSignal() as stop:
        callback = StopAtSignal(stop)
        trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=resume)
    if callback.signal:
        if rank() == 0:
            print(f"saved step {trainer.state.global_step}; the same command again continues from here", flush=True)
        raise Interrupted(callback.signal)
