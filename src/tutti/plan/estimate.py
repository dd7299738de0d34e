"""Closed-form estimates of named plans: seconds of a step and bytes of a device, computed in microseconds.

With m microbatches, a data-parallel axis of d and a pipeline of p devices with v stages each, for a step whose outline
(`plan.outline`) on the mesh inside of these has seconds F, B, U, bytes of parameters P and state S, activations A in
its layers and A' beside them:

    seconds = (F + B) / (d p) (1 + bubble)  +  U / (d p)  +  collectives over d
    bytes   = P / p  +  S / (d p)  +  gradients  +  in flight / v  A / (m d p)  +  A' / (m d)

ZeRO determines which of P, S and the gradients are divided by d. Recomputation adds a forward pass to the seconds and
keeps only the layers' outputs of A. Recomputation of attention adds the seconds of attention and drops what it keeps. A
mesh without an outline of its own is taken to differ from the bound as the nearest that has one and the same axes does.
Without any it gets the bound: its devices divide everything evenly and run one collective per layer and direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, log2, prod
from typing import NamedTuple

from tutti.hardware import Cluster
from tutti.plan.cuts import Layers
from tutti.plan.outline import Outline, Sums, outline_of
from tutti.plan.planner import Planner
from tutti.plan.recompute import Activations
from tutti.plan.reshard import sent_bytes
from tutti.plan.schedule import Pipe
from tutti.plan.textbook import Textbook

BUBBLES = {"zb-v": 2.0}  # the bubble over (p - 1) / v of the work: stages are unequal, and so are F, B and W
HIDDEN = 0.9  # the share of collectives on parameters and gradients that computation hides
INSIDE = 0.5  # the share of collectives on activations that computation hides
UNEVEN = 0.2  # share of the deviation of a device's stages from their mean that it waits for others


class Inner(NamedTuple):
    """What is inside of data parallelism and the pipeline: sizes of axes, and `sp` and `folded` of a `Textbook`."""

    cp: int = 1
    ep: int = 1
    tp: int = 1
    sp: bool = False
    folded: bool = False

    @staticmethod
    def of(book: Textbook) -> Inner:
        return Inner(book.cp, book.ep, book.tp, book.sp, book.folded)

    @property
    def book(self) -> Textbook:
        return Textbook(**self._asdict())

    @property
    def size(self) -> int:
        return self.cp * self.ep * self.tp


WHOLE = Inner()


@dataclass(frozen=True)
class Estimate:
    """An estimate of a plan.

    seconds: duration of a step.
    computing: seconds of a step in which a device computes.
    kinds: peak bytes of a device by kind.
    """

    seconds: float
    computing: float
    kinds: Mapping[str, float]

    @property
    def bytes(self) -> float:
        return sum(self.kinds.values())


class Estimator:
    """Estimates the named plans for one step.

    planner: the planner of the step.
    rows: rows of one microbatch, the global batch divided by `planner.accumulate`.
    """

    def __init__(self, planner: Planner, cluster: Cluster, rows: int):
        self.planner, self.cluster, self.rows = planner, cluster, rows
        self.activations = Activations(planner.step)
        self.computes = 1.0  # ratio of a device's compute seconds to the sum over its operators
        self.block = longest_block(planner.layers)
        self.known: dict[Inner, Outline] = {}
        self.impossible: set[Inner] = set()
        self.outline = cache(self._outline)
        self.refine(WHOLE)

    def refine(self, inner: Inner) -> bool:
        """Compute the outline of the cheapest choices on a mesh. Returns False if the model cannot be split so."""
        if inner in self.known or inner in self.impossible:
            return inner in self.known
        try:
            found = self.outlined(inner.book)
        except ValueError:
            self.impossible.add(inner)
            return False
        if inner != WHOLE:  # assume that row-independent seconds are divided evenly
            found = replace(found, once=self.known[WHOLE].split(inner.tp, inner.size).once)
        self.known[inner] = found
        self.outline.cache_clear()
        return True

    def by_rows(self) -> None:
        """Find the seconds that do not depend on the rows of a microbatch."""
        with suppress(ValueError):  # this number of devices does not fill whole nodes
            if self.rows > 1 and self.known[WHOLE].once == (Sums(), Sums()):
                self.known[WHOLE] = self.known[WHOLE].by_rows(self.outlined(Textbook(self.rows)), self.rows)
                self.outline.cache_clear()

    def on(self, cluster: Cluster) -> Estimator:
        """An estimator for another number of devices that shares this one's outlines."""
        other = copy(self)
        other.cluster, other.outline = cluster, cache(other._outline)
        return other

    def outlined(self, book: Textbook) -> Outline:
        planner = copy(self.planner)
        planner.cluster, planner.whole = self.cluster.of(prod(book.mesh.values())), False
        return outline_of(planner, planner.textbook(book), self.activations)

    def _outline(self, inner: Inner) -> Outline:
        if inner in self.known:
            return self.known[inner]
        whole, like = self.known[WHOLE], self.alike(inner)
        found = whole.split(inner.tp, inner.size)
        sent = back = self.least_sent(found, inner)
        if like:
            other, ideal = self.known[like], whole.split(like.tp, like.size)
            least = self.least_sent(ideal, like)
            found, sent, back = (
                found.scaled(other, ideal),
                sent * other.layers.sent / least,
                back * other.layers.back / least,
            )
        return replace(found, layers=replace(found.layers, sent=sent, back=back))

    def alike(self, inner: Inner) -> Inner | None:
        """The mesh nearest in size with an outline of its own and the same axes; None if there is none."""
        known = [other for other in self.known if axes_of(other) == axes_of(inner)]
        return min(
            known,
            key=lambda other: sum(abs(log2(a / b)) for a, b in zip(other[:3], inner[:3], strict=True)),
            default=None,
        )

    def of(self, book: Textbook, count: int) -> Estimate:
        """The estimate of a named plan with `count` microbatches."""
        o, again = self.outline(Inner.of(book)), book.recompute and not book.again
        p, v, rows = book.pipe.devices, book.pipe.chunks, self.planner.accumulate / (count * book.dp)
        in_layers, outside = (self.computes * seconds for seconds in o.seconds(rows, o.repeats(book)))
        sent, beside_sent = o.moves(rows, again)
        waits, last = self.waits(sent), outside + self.waits(beside_sent)
        share, slowest = self.fullest(o.depth, book.pipe, (in_layers + waits) / o.depth, last)
        beside = 1.0 if p == 1 else 0.5
        params, experts, state = (
            share * getattr(o.layers, kind) + beside * getattr(o.beside, kind)
            for kind in ("params", "experts", "state")
        )
        kinds = self.memory(o, book, count, rows, share, params, state)
        micro = in_layers + waits + last
        computing = count * slowest * (in_layers + outside) / micro
        bubble = BUBBLES.get(book.pipe.schedule, 1.0) * (p - 1) / v * micro / p
        update = (share * o.layers.update + beside * o.beside.update) / (book.dp if book.zero else 1)
        seconds = count * slowest + bubble + update
        seconds += self.reduced(book, count, params, experts, count * slowest)
        return Estimate(seconds, computing + update, kinds)

    def memory(self, o: Outline, book: Textbook, count: int, rows: float, share: float, params: float,
               state: float) -> dict[str, float]:  # fmt: skip
        """Bytes of the fullest device, by kind."""
        p, dp = book.pipe.devices, book.dp
        # Recomputation of layers reads their outputs once more, so only `sp` splits them over tp.
        in_layers = (
            rows * share * (1 if book.sp or not book.recompute or book.again else book.tp) * o.layers.keeps(book)
        )
        outside = rows * o.beside.keeps(book)
        first, last = most_in_flight(book.pipe, count)
        held = max(first * in_layers, last * in_layers + outside)
        again = rows * (o.layers.held - o.layers.keeps(book)) / o.depth
        piece = o.layers.params / o.depth if book.zero == 3 else 0.0  # gathered, of a layer
        waits = count > 1 or p > 1 or self.planner.problem.coupled
        return {
            "parameters": params / (dp if book.zero == 3 else 1),
            "optimizer state": state / (dp if book.zero else 1),
            "accumulated gradients" if count > 1 else "gradients": waits * params / (dp if book.zero > 1 else 1),
            "activations": held,
            "temporaries": again + 2 * rows * o.largest + piece,
        }

    def fullest(self, depth: int, pipe: Pipe, layer: float, last: float) -> tuple[float, float]:
        """The share of the layers that the fullest device has, and seconds of the slowest device for a microbatch.

        layer: seconds of a layer. last: seconds beside the layers, which the last stage has in addition. The fewer
        layers it has, the more the other stages have.
        """
        p, v = pipe.devices, pipe.chunks
        if p == 1:
            return 1.0, depth * layer + last
        found: list[tuple[float, float]] = []
        for x in range(ceil(depth / pipe.stages), -1, -1):  # layers of the last stage
            most = max(ceil((depth - x) / (pipe.stages - 1)), self.block)  # layers of another stage
            fuller = max(0, depth - x - (most - 1) * (pipe.stages - 1))  # stages that have so many
            device = v * (most - 1) + min(v, ceil(fuller / p))
            part = min(1.0, fuller / (pipe.stages - 1))
            varies = (part * (1 - part)) ** 0.5 / (most - 1 + part) if v > 1 else 0.0
            slowest = max(device * layer, (v - 1) * (most - 1) * layer + x * layer + last)
            found.append((slowest * (1 + UNEVEN * varies), device / depth))
        slowest, share = min(found)
        return min(1.0, share), slowest

    def waits(self, sent: float) -> float:
        """Seconds that collectives on activations add to a step: those that are not hidden slow down computation."""
        device = self.cluster.device
        return sent * (1 - INSIDE + INSIDE * device.yields) if device.computes_on else sent

    def least_sent(self, o: Outline, inner: Inner) -> float:
        """Seconds per direction of one collective for each axis and layer, for all rows."""
        stride, seconds = 1, 0.0
        for kind, k in zip(("all_reduce", "all_to_all", "ppermute"), (inner.tp, inner.ep, inner.cp), strict=True):
            if k > 1:
                size = int(o.border * (inner.tp if kind == "all_reduce" else 1))
                seconds += o.depth * self.cluster.time(kind, sent_bytes(kind, size, k), stride, k)
            stride *= k
        return seconds

    def reduced(self, book: Textbook, count: int, params: float, experts: float, computing: float) -> float:
        """Seconds in which a device waits for collectives on gradients and parameters."""
        stride, seconds, hidden = book.cp * book.ep * book.tp, 0.0, 0.0
        if book.cp * book.ep > 1:
            seconds += self.collective("all_reduce", params - experts, book.tp, book.cp * book.ep)
        if book.dp > 1:
            scatter = self.collective("reduce_scatter", params, stride, book.dp)
            gather = self.collective("all_gather", params / book.dp, stride, book.dp)
            if book.zero == 3:
                hidden += count * (scatter + (2 + (book.recompute and not book.again)) * gather)
            elif book.zero == 2:
                hidden, seconds = count * scatter, seconds + gather
            elif count == 1 and book.pipe.devices == 1:
                hidden += scatter + gather
            else:
                seconds += scatter + gather
        if not self.cluster.device.computes_on:
            return seconds + hidden
        yields = self.cluster.device.yields * min(hidden, computing)
        hides = HIDDEN if book.pipe.devices == 1 else INSIDE  # each part of a pipeline begins with collectives
        return seconds + yields + max(hidden - hides * computing, (1 - hides) * hidden)

    def collective(self, kind: str, local: float, stride: int, k: int) -> float:
        return self.cluster.time(kind, sent_bytes(kind, int(local), k), stride, k)


def most_in_flight(pipe: Pipe, count: int) -> tuple[float, float]:
    """Microbatches in flight, in units of a device's layers: of the device with most, and of the last. As
    `slots.in_flight` counts them in the schedules of named plans."""
    p, v = pipe.devices, pipe.chunks
    if pipe.schedule == "zb-v":
        return min(count, p), min(count, p)
    if pipe.schedule == "interleaved":
        return min(count, (2 * p - 1 + (v - 1) * p) / v), min(count, ((v - 1) * p + 1) / v)
    return min(count, p), 1.0


def axes_of(inner: Inner) -> tuple[bool, ...]:
    """Which axes a mesh has, and how they are used."""
    return (*(k > 1 for k in inner[:3]), inner.sp, inner.folded)


def longest_block(layers: Layers) -> int:
    """The largest number of layers that must stay in one pipeline stage."""
    longest, now = 1, 1
    for i in range(1, len(layers)):
        now = now + 1 if i in layers.inside else 1
        longest = max(longest, now)
    return longest
