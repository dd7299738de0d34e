"""Agreement of the ranks of a job about a checkpoint, over a separate Gloo group, so that any one thread can use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from tutti.checkpoint.failures import is_failure, reason
from tutti.exec.runtimes.runtime import TIMEOUT, in_job

T = TypeVar("T")


class Consensus:
    """Every rank creates one and makes the same calls. group: None for a single rank.

    Raises ValueError in a job whose process group is not initialized.
    """

    def __init__(self):
        if in_job() and not dist.is_initialized():
            raise ValueError("torch.distributed is not initialized: build the step before its Checkpoints")
        distributed = dist.is_initialized() and dist.get_world_size() > 1
        self.group: Any = dist.new_group(backend="gloo", timeout=TIMEOUT) if distributed else None
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)

    def all(self, mine: Any) -> list[Any]:
        """The values of all ranks, on all ranks."""
        if self.group is None:
            return [mine]
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, mine, self.group)
        return values

    def same(self, mine: Any, source: int = 0) -> Any:
        """The value of the source rank, on all ranks."""
        if self.group is None:
            return mine
        box = [mine]
        dist.broadcast_object_list(box, source, self.group)
        return box[0]

    def each(self, work: Callable[[], T]) -> list[T]:
        """The results of `work` on each rank, on all ranks. If it fails on one, all raise OSError with the first
        failure, so that no rank waits for one that stopped."""
        return _results(self.all(_attempt(work)))

    def one(self, work: Callable[[], T], source: int = 0) -> T:
        """The result of `work` on the source rank, on all ranks. Raises as `each`."""
        return _results([self.same(_attempt(work) if self.rank == source else None, source)])[0]


def _attempt(work: Callable[[], T]) -> tuple[str | None, T | None]:
    """(reason of failure or None, result)."""
    try:
        return None, work()
    except BaseException as error:
        if not is_failure(error):
            raise
        return reason(error), None


def _results(attempts: list[Any]) -> list[Any]:
    if whys := [why for why, _ in attempts if why is not None]:
        raise OSError(whys[0])
    return [result for _, result in attempts]
