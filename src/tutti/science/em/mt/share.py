"""Which process of a `torch.distributed` job computes what: frequencies, and where there are more processes, sites.

Process r of n takes every a-th frequency, a the largest divisor of n that is not over the number of frequencies. The
n/a processes with equal frequencies take every (n/a)-th site of the Jacobian. Results are gathered on all processes.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Share:
    """One process's share of `frequencies` and `sites`; all of them if there is no group."""

    def __init__(self, frequencies: int, sites: int, group: dist.ProcessGroup | None = None) -> None:
        self.frequencies, self.sites, self.group = frequencies, sites, group
        self.count = dist.get_world_size(group) if group is not None else 1
        self.apart = max(a for a in range(1, self.count + 1) if self.count % a == 0 and a <= frequencies)
        if self.count // self.apart > sites:
            raise ValueError(
                f"{self.count} processes cannot share {frequencies} frequencies and {sites} sites: use at most"
                f" {frequencies * sites}, best a divisor of {frequencies}"
            )
        self.rank = dist.get_rank(group) if group is not None else 0

    def own(self, rank: int | None = None) -> tuple[slice, slice]:
        """Frequencies and sites of a process; of this one if none is said."""
        rank = self.rank if rank is None else rank
        return slice(rank % self.apart, None, self.apart), slice(rank // self.apart, None, self.count // self.apart)

    def gather(self, mine: Tensor, split_sites: bool) -> Tensor:
        """All (mode, frequency, site, ...) from (mode, own frequency, site, ...), of own sites if `split_sites`."""
        if self.group is None:
            return mine
        each = -(-self.frequencies // self.apart), -(-self.sites // (self.count // self.apart))
        padded = mine.new_zeros(len(mine), each[0], each[1] if split_sites else mine.shape[2], *mine.shape[3:])
        padded[:, : mine.shape[1], : mine.shape[2]] = mine
        parts = [torch.empty_like(padded) for _ in range(self.count)]
        dist.all_gather(parts, padded, group=self.group)
        out = mine.new_empty(len(mine), self.frequencies, self.sites if split_sites else mine.shape[2], *mine.shape[3:])
        for rank, part in enumerate(parts):
            f, s = self.own(rank)
            into = out[:, f, s] if split_sites else out[:, f]
            into.copy_(part[:, : into.shape[1], : into.shape[2]])
        return out
