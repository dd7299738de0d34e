"""The ranks of a job, of one mind about a checkpoint: over a Gloo group of their own, so from any one thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from tutti.checkpoint.write import reason
from tutti.exec.runtime import TIMEOUT, in_job

T = TypeVar("T")


class Consensus:
    """Every rank makes one, and calls the same. group: None where there is a single rank.

    Raises ValueError where this process is one of several that have not found one another yet.
    """

    def __init__(self):
        if in_job() and not dist.is_initialized():
            raise ValueError("the ranks of this job do not know one another: make the step first, then its checkpoints")
        several = dist.is_initialized() and dist.get_world_size() > 1
        self.group: Any = dist.new_group(backend="gloo", timeout=TIMEOUT) if several else None
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)

    def all(self, mine: Any) -> list[Any]:
        """What each rank gives, on all ranks."""
        if self.group is None:
            return [mine]
        given: list[Any] = [None] * self.ranks
        dist.all_gather_object(given, mine, self.group)
        return given

    def same(self, mine: Any, source: int = 0) -> Any:
        """What one rank gives."""
        if self.group is None:
            return mine
        box = [mine]
        dist.broadcast_object_list(box, source, self.group)
        return box[0]

    def each(self, work: Callable[[], T]) -> list[T]:
        """What some work gives on each rank, on all ranks. Raises OSError on all where it fails on one, with the reason
        of the first: no rank goes on to communicate with one that does not."""
        return _results(self.all(_attempt(work)))

    def one(self, work: Callable[[], T], source: int = 0) -> T:
        """What some work gives on one rank, on all ranks. Raises as `each`."""
        return _results([self.same(_attempt(work) if self.rank == source else None, source)])[0]


def _attempt(work: Callable[[], T]) -> tuple[str | None, T | None]:
    """Why it failed, and what it gives."""
    try:
        return None, work()
    except (Exception, CheckpointException) as error:
        return reason(error), None


def _results(attempts: list[Any]) -> list[Any]:
    if whys := [why for why, _ in attempts if why is not None]:
        raise OSError(whys[0])
    return [result for _, result in attempts]
