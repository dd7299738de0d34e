"""A cluster: equal devices, and the hierarchy of links between them.

Ranks number the devices, the innermost level fastest: with levels ((8, nvlink), (16, infiniband)) the ranks 0
to 7 share a node, and ranks 0, 8, 16, ... sit at the same place of different nodes.

    >>> cluster = Cluster.parse("h100:16x8")
    >>> cluster.size
    128
    >>> cluster.link(stride=1, size=8) == cluster.levels[0][1]
    True
    >>> cluster.link(stride=8, size=16) == cluster.levels[1][1]
    True
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from tutti.cluster.device import Device, Dtype, Link

# Messages that each of n ranks sends, one after the other, in a ring (all_to_all: one to each other rank).
# Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005).
MESSAGES: dict[str, Callable[[int], int]] = {
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: n - 1,
    "all_reduce": lambda n: 2 * (n - 1),
    "all_to_all": lambda n: n - 1,
    "shift": lambda n: 1,
}


@dataclass(frozen=True)
class Cluster:
    """``levels``: (members, link between them) of every level, innermost first."""

    device: Device
    levels: tuple[tuple[int, Link], ...]

    def __post_init__(self) -> None:
        if not self.levels or any(size < 1 for size, _ in self.levels):
            sizes = [size for size, _ in self.levels]
            raise ValueError(f"a cluster needs levels of at least one member each, innermost first, not {sizes}")

    def __str__(self) -> str:
        return f"{self.device.name}:" + "x".join(str(size) for size, _ in reversed(self.levels))

    @property
    def size(self) -> int:
        """Number of devices."""
        return prod(size for size, _ in self.levels)

    def peak(self, dtype: Dtype) -> float:
        """Peak FLOP/s of all devices together."""
        return self.size * self.device.peak_of(dtype)

    def link(self, stride: int, size: int) -> Link:
        """The slowest link that a group crosses, of ``size`` ranks that are ``stride`` apart.

        The groups tile the cluster, as the ranks along one axis of a mesh do: ranks ``base + i * stride``,
        where ``base // stride`` is a multiple of ``size``. The answer holds for the worst placed of them.
        """
        if stride < 1 or size < 1 or stride * size > self.size:
            raise ValueError(
                f"no group of {size} ranks {stride} apart in {self} of {self.size} devices; "
                f"stride x size must be at most {self.size}"
            )
        inside = 1
        for members, link in self.levels:
            inside *= members
            if inside % (stride * size) == 0:
                return link
        return self.levels[-1][1]

    def time(self, kind: str, sent_bytes: float, stride: int, size: int) -> float:
        """Seconds of a collective in which each rank sends ``sent_bytes`` in all.

        ``kind`` is one of all_gather, all_reduce, reduce_scatter, all_to_all; stride and size as in ``link``.
        Messages times latency plus bytes over bandwidth, of the slowest link, in ring algorithms.
        """
        if kind not in MESSAGES:
            raise ValueError(f"no collective {kind!r}; known are {', '.join(MESSAGES)}")
        link = self.link(stride, size)
        return 0.0 if size == 1 else link.seconds(sent_bytes, MESSAGES[kind](size))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @staticmethod
    def from_json(text: str) -> Cluster:
        """The inverse of ``to_json``."""
        data: dict[str, Any] = json.loads(text)
        try:
            levels = tuple((size, Link(**link)) for size, link in data["levels"])
            return Cluster(Device(**data["device"]), levels)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a cluster: {error}") from error

    @staticmethod
    def parse(text: str) -> Cluster:
        """A cluster of a known device: "h100:8", "h100:16x8" (16 nodes of 8), "cpu:4", "h200" (one)."""
        from tutti.cluster.presets import cluster

        return cluster(text)
