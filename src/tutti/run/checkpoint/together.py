"""The ranks of a job, of one mind about a checkpoint: over a Gloo group of their own, so from any one thread."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tutti.run.runtime import TIMEOUT, in_job


class Together:
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
