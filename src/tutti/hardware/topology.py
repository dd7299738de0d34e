"""A cluster: equal devices, and the hierarchy of links between them.

Ranks number the devices, the innermost level fastest: with levels ((8, nvlink), (16, infiniband)) the ranks 0
to 7 share a node, and ranks 0, 8, 16, ... have the same position in different nodes.

    >>> cluster = Cluster.parse("h100:16x8")
    >>> cluster.size
    128
    >>> cluster.link(stride=1, size=8) == cluster.levels[0][1]
    True
    >>> cluster.link(stride=8, size=16) == cluster.levels[1][1]
    True
    >>> [line.name for line in cluster.lines("all_to_all", stride=1, size=128)]
    ['pairwise LL', 'pairwise LL128', 'pairwise Simple']
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

from tutti.hardware import file
from tutti.hardware.collectives import MESSAGES, Line, Stage, lines
from tutti.hardware.curve import Curve
from tutti.hardware.device import Device, Dtype, Link
from tutti.hardware.names import device_and_levels
from tutti.hardware.presets import PRESETS


@dataclass(frozen=True)
class Cluster:
    """``levels``: (members, link between them) of every level, innermost first."""

    device: Device
    levels: tuple[tuple[int, Link], ...]
    _costs: dict = field(default_factory=dict, init=False, repr=False, compare=False)  # of collectives, for `time`

    def __post_init__(self) -> None:
        if not self.levels or any(size < 1 for size, _ in self.levels):
            sizes = [size for size, _ in self.levels]
            raise ValueError(f"a cluster needs levels of at least one member each, innermost first, not {sizes}")

    def __str__(self) -> str:
        return f"{self.device.name}:" + "x".join(
            str(size) + (f"/{link.oversubscription:g}" if link.oversubscription != 1 else "")
            for size, link in reversed(self.levels)
        )

    @property
    def size(self) -> int:
        """Number of devices."""
        return prod(size for size, _ in self.levels)

    def of(self, count: int) -> Cluster:
        """A cluster of `count` of the same devices: as sold for presets, else with the outermost level resized.

        Raises ValueError if they do not fill nodes.
        """
        preset = PRESETS.get(self.device.name)
        if preset and preset.device == replace(self.device, memory=preset.device.memory):
            return replace(Cluster.parse(f"{self.device.name}:{count}"), device=self.device)
        *inner, (members, link) = self.levels
        inside = self.size // members
        if count % inside:
            raise ValueError(f"{count} devices do not fill groups of {inside}")
        return Cluster(self.device, (*inner, (count // inside, link)))

    def peak(self, dtype: Dtype) -> float:
        """Peak FLOP/s of all devices together."""
        return self.size * self.device.peak_of(dtype)

    def link(self, stride: int, size: int) -> Link:
        """The outermost link that a group of ``size`` ranks, ``stride`` apart, crosses.

        The groups tile the cluster like the ranks along a mesh axis: ranks ``base + i * stride``, where ``base //
        stride`` is a multiple of ``size``. The answer holds for the worst placed group.
        """
        return self.levels[self._outermost(stride, size)][1]

    def stages(self, stride: int, size: int) -> list[Stage]:
        """The part of a group on each level, without levels on which it has one member. Arguments as in ``link``.

        A group with different numbers of ranks in the units of a level counts as ``size`` members on the outermost
        level that it crosses: each of the ``2 x stride`` groups that may leave a unit below has its share of the
        unit's ports.
        """
        outermost, stages, below = self._outermost(stride, size), [], 1
        for i, (members, link) in enumerate(self.levels):
            inside = below * members
            if (below % stride and stride % below) or (inside % (stride * size) and (stride * size) % inside):
                below = prod(m for m, _ in self.levels[:outermost])
                members, link = self.levels[outermost]
                within = max(1, min(size - 1, below // (2 * stride)))
                return [Stage(link, size, within, max(size, members), 1, below, not outermost)]
            within = max(1, below // stride)
            here = min(size, max(1, inside // stride)) // within
            if here > 1:
                stages.append(Stage(link, here, within, members, max(1, stride // below), below, i == 0))
            below = inside
        return stages

    def _outermost(self, stride: int, size: int) -> int:
        if stride < 1 or size < 1 or stride * size > self.size:
            raise ValueError(
                f"no group of {size} ranks {stride} apart in {self} of {self.size} devices; "
                f"stride x size must be at most {self.size}"
            )
        inside = 1
        for i, (members, _) in enumerate(self.levels):
            inside *= members
            if inside % (stride * size) == 0:
                return i
        return max((i for i, (members, _) in enumerate(self.levels) if members > 1), default=0)

    def lines(self, kind: str, stride: int, size: int) -> list[Line]:
        """The costs of a collective's algorithms on a group. The cheapest counts."""
        _check(kind)
        return lines(kind, self.stages(stride, size)) if size > 1 else [Line("nothing", 0.0, 0.0)]

    def time(self, kind: str, sent_bytes: float, stride: int, size: int, messages: int = 1) -> float:
        """Seconds of equal, sequential collectives in which each rank sends ``sent_bytes`` in total.

        Bytes as sent in a ring, whatever the algorithm; of all ``messages`` collectives together. ``kind`` is one of
        all_gather, all_reduce, reduce_scatter, all_to_all, exchange (as an all_to_all), ppermute; stride and size as in
        ``link``. All groups of the cluster run at once. The cheapest algorithm counts, or the measurement if its
        link has one. Raises ValueError for an unknown kind, or a group that does not fit.
        """
        kind = "all_to_all" if kind == "exchange" else kind
        key = kind, stride, size
        if key not in self._costs:
            self._costs[key] = self._cost(kind, stride, size)
        return messages * self._costs[key](sent_bytes / messages)

    def _cost(self, kind: str, stride: int, size: int) -> Callable[[float], float]:
        _check(kind)
        stages = self.stages(stride, size)
        measured = {k: c for name, k, c in stages[0].link.measured if name == kind} if len(stages) == 1 else {}
        if measured:
            near = min(measured, key=lambda k: (abs(k - size), k))
            return _scaled(measured[near], MESSAGES[kind](size) / MESSAGES[kind](near))
        algorithms = self.lines(kind, stride, size)
        return lambda sent: min(line.fixed + line.per_byte * sent for line in algorithms)

    def to_json(self) -> str:
        return file.dump(self)

    @staticmethod
    def from_json(text: str) -> Cluster:
        """The inverse of ``to_json``. Raises ``ValueError`` if the text is not a cluster."""
        return Cluster(*file.load(text))

    @staticmethod
    def parse(text: str) -> Cluster:
        """A cluster of a known device, or the one in a JSON file (a path that ends in .json).

        "h100:8", "h100:16x8" (16 nodes of 8), "h100:64/3x16x8" (64 pods of 16 nodes, three times more bytes into the
        spine than it carries), "cpu:4", "h200" (one device), "mine.json".
        """
        if not text.strip().endswith(".json"):
            return Cluster(*device_and_levels(text))
        try:
            return Cluster.from_json(Path(text.strip()).read_text())
        except FileNotFoundError:
            raise ValueError(f"no cluster {text!r}: there is no such file") from None
        except ValueError as error:
            raise ValueError(f"{text.strip()}: {error}") from None


def _scaled(curve: Curve, messages: float) -> Callable[[float], float]:
    """A measurement for a group of another size: latency is scaled by the number of messages."""
    return lambda sent: curve.seconds(sent) + (messages - 1) * curve.start


def _check(kind: str) -> None:
    if kind not in MESSAGES:
        raise ValueError(f"unknown collective {kind!r}; known are {', '.join(MESSAGES)}")
