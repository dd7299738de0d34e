"""A device and a link: what computes, and what carries bytes between two that compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

Dtype = torch.dtype | str


@dataclass(frozen=True)
class Device:
    """One accelerator, or the cores that one process uses.

    peak: FLOP/s of matrix products by dtype name ("float32", "bfloat16", ...), without sparsity.
    memory: bytes. bandwidth: bytes/s of memory, reads and writes together.
    efficiency: share of the peak that large matrix products reach, by dtype name; 1 where it is not given.
    overhead: seconds to launch one operator.
    source: where the figures come from.
    """

    name: str
    peak: Mapping[str, float] = field(hash=False)
    memory: float
    bandwidth: float
    efficiency: Mapping[str, float] = field(default_factory=dict, hash=False)
    overhead: float = 0.0
    source: str = ""

    def peak_of(self, dtype: Dtype) -> float:
        """Peak FLOP/s in this dtype. ``ValueError`` where it is not known."""
        name = dtype_name(dtype)
        if name not in self.peak:
            raise ValueError(f"device {self.name} has no peak for {name}; known are {', '.join(self.peak)}")
        return self.peak[name]

    def rate(self, dtype: Dtype) -> float:
        """FLOP/s that large matrix products reach in this dtype."""
        return self.peak_of(dtype) * self.efficiency.get(dtype_name(dtype), 1.0)


@dataclass(frozen=True)
class Link:
    """What joins the members of one level of a cluster.

    bandwidth: bytes/s that one device can send while it also receives as much. latency: seconds a message.
    efficiency: share of the bandwidth that collectives reach. source: where the figures come from.
    """

    bandwidth: float
    latency: float
    efficiency: float = 1.0
    source: str = ""

    def seconds(self, sent: float, messages: int) -> float:
        """Time for one device to send this many bytes in this many messages, one after the other."""
        return messages * self.latency + sent / (self.bandwidth * self.efficiency)


def dtype_name(dtype: Dtype) -> str:
    return str(dtype).removeprefix("torch.")
