"""The cost of a collective on a hierarchy of links: for each algorithm, seconds = fixed + per_byte x bytes sent.

A group has members on several levels, innermost first. On a level it has g members, each of which holds c ranks of
the group; a rank can send b bytes/s there while all groups of the cluster do the same (see `Stage`). With k ranks in
all, L the latency of a message on the level, and V bytes in the buffer of the collective:

| algorithm | fixed | time of the bytes |
|---|---|---|
| ring, one pass (all_gather, reduce_scatter) | sum of L x hops over the level | max of (k-1)/k V / (c b) |
| ring, all_reduce | two passes | two passes |
| tree, all_reduce | 2 sum of L x log2 g (innermost level of the cluster: g - 1) | max of 2 V / (c b) |
| hierarchical, a pass | sum of L (g - 1) | sum of (g-1)/g V / (c b) |
| pairwise (all_to_all) | sum of L x peers over the level | max of (k-c)/k V / b |
| direct (ppermute) | max of L | max of V / min(b of one rank, c b) |

A ring over k ranks crosses a level g1 g2 ... gn - g2 ... gn times in a pass; several rings at once use the ports of
all ranks of a unit, which is the c in c b. Sources:
- ring: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009)
- pairwise exchange, latency of trees: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective
  communication operations in MPICH" (2005)
- sums of latencies over levels, double binary trees with chains inside a node, protocols: NCCL 2.19 src/graph/tuning.cc
- rings in all dims of a torus at once: N. Jain and Y. Sabharwal, "Optimal bucket algorithms for large MPI
  collectives on torus interconnects" (2010)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil, log2, prod

from tutti.hardware.device import Link, Way

PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
MESSAGES: dict[str, Callable[[int], int]] = {  # sequential messages of each of k ranks, in a ring or pairwise
    "all_gather": lambda k: k - 1,
    "reduce_scatter": lambda k: k - 1,
    "all_reduce": lambda k: 2 * (k - 1),
    "all_to_all": lambda k: k - 1,
    "ppermute": lambda k: 1,
}


@dataclass(frozen=True)
class Stage:
    """The part of a group on one level of a cluster.

    members: units of the level below in which the group has ranks, inside one unit of this level (g).
    within: ranks of the group in each of them (c). of: number of members of the level. spacing: distance of the group's
    members on the level. below: devices in a unit of the level below. innermost: whether the level is the cluster's
    first.
    """

    link: Link
    members: int
    within: int
    of: int
    spacing: int = 1
    below: int = 1
    innermost: bool = True

    @property
    def port(self) -> float:
        """Bytes/s of one port, or of one device."""
        return self.link.bandwidth * self.link.efficiency / self.link.oversubscription

    @property
    def each(self) -> float:
        """Bytes/s that each rank can send over the level while all ranks of the cluster do."""
        return self.port * (self.link.ports / self.below if self.link.ports else 1)

    @property
    def around(self) -> float:
        """`each` for ring algorithms: the links to other members of the group.

        In a ring, groups of every `spacing`-th member share its links, and a group that does not close the ring
        goes one way and comes back the other.
        """
        if self.link.kind == "mesh":
            return self.each * (self.members - 1) / max(1, self.of - 1)
        if self.link.kind == "ring":
            return self.each / self.spacing / (1 if self.members * self.spacing == self.of else 2)
        return self.each

    @property
    def beside(self) -> float:
        """`each` to a single other member: one of a device's links."""
        if self.link.kind == "mesh":
            return self.each / max(1, self.of - 1)
        return self.each / (2 * self.spacing) if self.link.kind == "ring" else self.each

    def exchanged(self, k: int) -> float:
        """Seconds per byte of a rank's all-to-all buffer over this level, for k ranks in the group.

        All that leaves the unit below. In a ring, counted in hops: the other members of g are g^2 // 4 links away in
        total.
        """
        if self.link.kind == "ring":
            return self.members**2 // 4 / self.members / self.around
        return (k - self.within) / k / self.around


@dataclass(frozen=True)
class Line:
    """Seconds of a collective by one algorithm: ``fixed + per_byte * sent``. sent: bytes that each rank sends in a ring
    (formulas in ``tutti.plan.layouts.reshard``)."""

    name: str
    fixed: float
    per_byte: float

    def seconds(self, sent: float) -> float:
        return self.fixed + self.per_byte * sent


Latency = Callable[[Link], float]


def ring(kind: str, stages: Sequence[Stage], latency: Latency) -> tuple[float, float]:
    """All-gather, reduce-scatter or all-reduce in rings through all ranks."""
    outside = [prod(s.members for s in stages[i:]) for i in range(len(stages) + 1)]
    hops = sum((outside[i] - outside[i + 1]) * latency(s.link) for i, s in enumerate(stages))
    return PASSES[kind] * hops, max(1 / (s.within * b) for s, b in _pooled(stages))


def tree(kind: str, stages: Sequence[Stage], latency: Latency) -> tuple[float, float]:
    """All-reduce up and down two binary trees, each for half of the bytes."""
    k = prod(s.members for s in stages)
    hops = sum((s.members - 1 if s.innermost else ceil(log2(s.members))) * latency(s.link) for s in stages)
    return 2 * hops, k / (k - 1) * max(1 / (s.within * b) for s, b in _pooled(stages))


def hierarchical(kind: str, stages: Sequence[Stage], latency: Latency) -> tuple[float, float]:
    """Level by level: reduce-scatter outwards, all-gather inwards; each level moves the shard of the levels below."""
    k = prod(s.members for s in stages)
    hops = sum((s.members - 1) * latency(s.link) for s in stages)
    parts = ((members - 1) / members / (s.within * b) for s, b, members in _merged(stages))
    return PASSES[kind] * hops, k / (k - 1) * sum(parts)


def pairwise(kind: str, stages: Sequence[Stage], latency: Latency) -> tuple[float, float]:
    """Each rank sends its part to each other rank."""
    k = prod(s.members for s in stages)
    hops = sum(s.within * (s.members - 1) * latency(s.link) for s in stages)
    return hops, k / (k - 1) * max(s.exchanged(k) for s in stages)


def direct(kind: str, stages: Sequence[Stage], latency: Latency) -> tuple[float, float]:
    """Each rank sends to the next one, cyclically; one rank of each unit sends out of it."""
    slowest = max(1 / min(s.beside * s.within, s.port if s.link.kind == "switch" else s.beside) for s in stages)
    return max(latency(s.link) for s in stages), slowest


# For each collective (algorithm, protocols of the links that it uses). The cheapest counts.
ALGORITHMS = {
    "all_gather": ((ring, "ring"), (hierarchical, "hierarchical")),
    "reduce_scatter": ((ring, "ring"), (hierarchical, "hierarchical")),
    "all_reduce": ((ring, "ring"), (tree, "tree"), (hierarchical, "hierarchical")),
    "all_to_all": ((pairwise, "ring"),),
    "ppermute": ((direct, "ring"),),
}


def lines(kind: str, stages: Sequence[Stage]) -> list[Line]:
    """The lines of all algorithms and protocols that every link of the group supports. A link whose ways have no
    protocol supports each."""
    costs = []
    for algorithm, name in ALGORITHMS[kind]:
        ways = [{w.protocol: w for w in ways_of(s.link) if w.algorithm == name} for s in stages]
        for protocol in dict.fromkeys(protocol for other in ways for protocol in other):
            if all(protocol in other or "" in other for other in ways):
                here = {s.link: other.get(protocol) or other[""] for s, other in zip(stages, ways, strict=True)}
                fixed, per_byte = algorithm(kind, stages, lambda link, here=here: here[link].latency)
                start, share = max(w.start for w in here.values()), min(w.share for w in here.values())
                costs.append(Line(f"{algorithm.__name__} {protocol}".strip(), start + fixed, per_byte / share))
    return costs


def ways_of(link: Link) -> tuple[Way, ...]:
    """The algorithms and protocols of a link; ring, tree and hierarchical by default."""
    return link.ways or tuple(Way(a, "", 0.0, link.latency, 1.0) for a in ("ring", "tree", "hierarchical"))


def _merged(stages: Sequence[Stage]) -> list[tuple[Stage, float, int]]:
    """(stage, bytes/s of a rank, members). Adjacent rings form one torus, whose dims are used at once."""
    merged = []
    for is_ring, run in groupby(stages, lambda s: s.link.kind == "ring"):
        run = list(run)
        if is_ring:
            merged.append((run[0], len(run) * min(s.around for s in run), prod(s.members for s in run)))
        else:
            merged += [(s, s.around, s.members) for s in run]
    return merged


def _pooled(stages: Sequence[Stage]) -> list[tuple[Stage, float]]:
    return [(stage, b) for stage, b, _ in _merged(stages)]
