"""Measure the links between ranks, between two recorded steps.

A collective is as slow as its slowest link, and does not show which one that is. So each rank exchanges messages of
`SIZE` bytes with the ranks 1, 2, 4, ... places away, first forwards, then backwards.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from tutti.launch.heartbeat import HEARTBEAT

MESSAGES = 4  # messages per link; the fastest counts
SIZE = {"cpu": 1 << 20, "cuda": 1 << 24}  # bytes


class Links:
    """The links of one rank. device: where the backend's tensors are."""

    def __init__(self, device: torch.device):
        self.rank, self.ranks, self.device = dist.get_rank(), dist.get_world_size(), device
        self.bytes = SIZE[device.type]
        self.distances = sorted({d % self.ranks for i in range(self.ranks.bit_length()) for d in (2**i, -(2**i))} - {0})

    def measure(self) -> dict[int, float]:
        """Seconds of a message from each measured rank. Every rank has to call it."""
        with HEARTBEAT.within("exchange", "messages that try out links"):
            return self._measured()

    def _measured(self) -> dict[int, float]:
        outgoing, incoming = torch.zeros(2, self.bytes, dtype=torch.uint8, device=self.device)
        ready, seconds_from = torch.zeros(2, device=self.device), {}
        for distance in self.distances:
            source, target = (self.rank - distance) % self.ranks, (self.rank + distance) % self.ranks
            self._exchange(ready[:1], ready[1:], source, target)  # wait until both ranks are ready
            self._exchange(ready[:1], ready[1:], target, source)
            seconds_from[source] = min(self._exchange(outgoing, incoming, source, target) for _ in range(MESSAGES))
        return seconds_from

    def _exchange(self, outgoing: torch.Tensor, incoming: torch.Tensor, source: int, target: int) -> float:
        """Send and receive at once. Returns the seconds until both are done."""
        begin = time.perf_counter()
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, incoming, source), dist.P2POp(dist.isend, outgoing, target)]
        )
        works[0].wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        took = time.perf_counter() - begin
        for work in works[1:]:
            work.wait()
        return took
