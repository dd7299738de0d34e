"""Closed-form estimates of named plans: seconds of a step and bytes of a device, of thousands of plans at once.

With m microbatches, a data-parallel axis of d and a pipeline of p devices with v stages each, for a step whose outline
(`plan.search.outline`) on the mesh inside of these has seconds F, B, U, bytes of parameters P and state S, activations
A in its layers and A' beside them:

    seconds = (F + B) / (d p) (1 + bubble)  +  U / (d p)  +  collectives over d
    bytes   = P / p  +  S / (d p)  +  gradients  +  in flight / v  A / (m d p)  +  A' / (m d)

ZeRO determines which of P, S and the gradients are divided by d. Recomputation adds a forward pass to the seconds and
keeps only the layers' outputs of A. Recomputation of attention adds the seconds of attention and drops what it keeps. A
mesh without an outline of its own is taken to differ from the bound as the nearest that has one and the same axes does.
Without any it gets the bound: its devices divide everything evenly and run one collective per layer and direction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import cache
from math import log2, prod
from typing import NamedTuple

import numpy as np

from tutti.hardware import Cluster
from tutti.plan.layouts.reshard import sent_bytes
from tutti.plan.pipeline.cuts import Layers
from tutti.plan.planner import Planner
from tutti.plan.search.outline import Outline, Sums, outline_of
from tutti.plan.search.recompute import Activations
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
class Columns:
    """Named plans with one inner mesh. All fields but `inner` are arrays with one element per plan.

    count: number of microbatches. dp: size of data parallelism. zero: ZeRO stage. devices, chunks: number of devices
    of the pipeline, and number of stages on each.
    schedule: name of the pipeline's schedule. again: whether all of a layer is recomputed. attention: whether parts of
    layers are, which `recompute-attention` names.
    """

    inner: Inner
    count: np.ndarray
    dp: np.ndarray
    zero: np.ndarray
    devices: np.ndarray
    chunks: np.ndarray
    schedule: np.ndarray
    again: np.ndarray
    attention: np.ndarray

    @staticmethod
    def of(entries: Sequence[tuple[Textbook, int]]) -> Columns:
        """The columns of named plans and their numbers of microbatches. Their inner meshes must be equal."""
        rows = [
            (count, book.dp, book.zero, book.pipe.devices, book.pipe.chunks, book.pipe.schedule,
             book.recompute and not book.again, bool(book.again)) for book, count in entries
        ]  # fmt: skip
        return Columns(Inner.of(entries[0][0]), *map(np.array, zip(*rows, strict=True)))

    @property
    def stages(self) -> np.ndarray:
        return self.devices * self.chunks

    @property
    def one_program(self) -> np.ndarray:
        """Whether the backward pass uses workspaces of the forward pass: both are in one Program, and no operand of a
        layer is recomputed."""
        return (self.devices == 1) & ~self.again

    @property
    def ranks(self) -> np.ndarray:
        """Devices that have the same dense parameters of a layer, over which ZeRO shards them."""
        return self.dp * self.inner.cp * self.inner.ep

    def __getitem__(self, those: np.ndarray) -> Columns:
        """The plans with these indices, or where this mask is true."""
        return replace(self, **{f.name: getattr(self, f.name)[those] for f in fields(self) if f.name != "inner"})


class Estimates(NamedTuple):
    """Estimates of plans, each an array with one element per plan.

    seconds: duration of a step. computing: seconds of a step in which a device computes. kinds: peak bytes of a device
    by kind.
    """

    seconds: np.ndarray
    computing: np.ndarray
    kinds: Mapping[str, np.ndarray]

    @property
    def bytes(self) -> np.ndarray:
        return np.sum(list(self.kinds.values()), axis=0)


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
        self.outlines: dict[Inner, Outline] = {}
        self.impossible: set[Inner] = set()
        self.outline = cache(self._outline)
        self.refine(WHOLE)

    def refine(self, inner: Inner) -> bool:
        """Compute the outline of the cheapest choices on a mesh. Returns False if the model cannot be split so."""
        if inner in self.outlines or inner in self.impossible:
            return inner in self.outlines
        try:
            outline = self.outlined(inner.book)
        except ValueError:
            self.impossible.add(inner)
            return False
        if inner != WHOLE:  # assume that row-independent seconds are divided evenly
            outline = replace(outline, once=self.outlines[WHOLE].split(inner.tp, inner.size).once)
        self.outlines[inner] = outline
        self.outline.cache_clear()
        return True

    def by_rows(self) -> None:
        """Find the seconds that do not depend on the rows of a microbatch."""
        with suppress(ValueError):  # this number of devices does not fill whole nodes
            if self.rows > 1 and self.outlines[WHOLE].once == (Sums(), Sums()):
                self.outlines[WHOLE] = self.outlines[WHOLE].by_rows(self.outlined(Textbook(self.rows)), self.rows)
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
        if inner in self.outlines:
            return self.outlines[inner]
        whole, like = self.outlines[WHOLE], self.alike(inner)
        outline = whole.split(inner.tp, inner.size)
        sent = back = self.least_sent(outline, inner)
        if like:
            other, ideal = self.outlines[like], whole.split(like.tp, like.size)
            least = self.least_sent(ideal, like)
            outline, sent, back = (
                outline.scaled(other, ideal),
                sent * other.layers.sent / least,
                back * other.layers.back / least,
            )
        return replace(outline, layers=replace(outline.layers, sent=sent, back=back))

    def alike(self, inner: Inner) -> Inner | None:
        """The mesh nearest in size with an outline of its own and the same axes; None if there is none."""
        similar = [other for other in self.outlines if axes_of(other) == axes_of(inner)]
        return min(
            similar,
            key=lambda other: sum(abs(log2(a / b)) for a, b in zip(other[:3], inner[:3], strict=True)),
            default=None,
        )

    def of(self, plans: Columns) -> Estimates:
        """The estimates of named plans."""
        o, p = self.outline(plans.inner), plans.devices
        rows = self.planner.accumulate / (plans.count * plans.dp)
        repeated = np.where(plans.attention, o.attention_share, plans.again)
        in_layers, outside = (
            self.computes * (seconds - np.where(plans.one_program, rows * s.repeats, 0.0))
            for s, seconds in zip((o.layers, o.beside), o.seconds(rows, repeated), strict=True)
        )
        sent, beside_sent = o.moves(rows, plans.again)
        waits, last = self.waits(sent), outside + self.waits(beside_sent)
        share, slowest = self.fullest(o.depth, plans, (in_layers + waits) / o.depth, last)
        beside = np.where(p == 1, 1.0, 0.5)
        params, experts, state, update = (
            share * getattr(o.layers, kind) + beside * getattr(o.beside, kind)
            for kind in ("params", "experts", "state", "update")
        )
        micro = in_layers + waits + last
        computing = plans.count * slowest * (in_layers + outside) / micro
        bubble = np.ones(len(p))
        for schedule, factor in BUBBLES.items():
            bubble[plans.schedule == schedule] = factor
        bubble = bubble * (p - 1) / plans.chunks * micro / p
        dense = 1 - experts / np.maximum(params, 1)
        sharded = dense / plans.ranks + (1 - dense) / plans.dp  # `ep` divides the experts already
        update = update * np.where(plans.zero > 0, sharded, 1)
        seconds = plans.count * slowest + bubble + update
        seconds += self.reduced(plans, params, experts, plans.count * slowest)
        kinds = self.memory(o, plans, rows, share, params, state, sharded)
        return Estimates(seconds, computing + update, kinds)

    def memory(self, o: Outline, plans: Columns, rows: np.ndarray, share: np.ndarray, params: np.ndarray,
               state: np.ndarray, sharded: np.ndarray) -> dict[str, np.ndarray]:  # fmt: skip
        """Bytes of the fullest device, by kind. sharded: share of the parameters that ZeRO leaves on a device."""
        inner, zero = plans.inner, plans.zero
        saved, beside_saved = (
            np.where(plans.attention, s.activations - s.scores, np.where(plans.again, s.boundaries, s.activations))
            for s in (o.layers, o.beside)
        )
        workspaces, beside_workspaces = (np.where(plans.one_program, s.workspaces, 0.0) for s in (o.layers, o.beside))
        # Recomputation of layers reads their outputs once more, so only `sp` splits them over tp.
        in_layers = rows * share * np.where(plans.again & (not inner.sp), inner.tp, 1) * (saved + workspaces)
        first, last = most_in_flight(plans)
        repeated = rows * (o.layers.activations - saved) / o.depth
        gathered = np.where(zero == 3, o.layers.params / o.depth, 0.0)  # a layer
        waits = (plans.count > 1) | (plans.devices > 1) | self.planner.problem.coupled
        return {
            "parameters": params * np.where(zero == 3, sharded, 1),
            "optimizer state": state * np.where(zero > 0, sharded, 1),
            "gradients": waits * params * np.where(zero > 1, sharded, 1),
            "activations": np.maximum(first * in_layers, last * in_layers + rows * (beside_saved + beside_workspaces)),
            "temporaries": repeated + 2 * rows * o.largest + gathered,
        }

    def fullest(self, depth: int, plans: Columns, layer: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The share of the layers that the fullest device has, and seconds of the slowest device for a microbatch.

        layer: seconds of a layer. last: seconds beside the layers, which the last stage has in addition. The fewer
        layers it has, the more the other stages have.
        """
        p, v, others = plans.devices, plans.chunks, np.maximum(plans.stages - 1, 1)
        share, slowest = np.ones(len(p)), np.where(p == 1, depth * layer + last, np.inf)
        widest = np.where(p == 1, -1, -(-depth // plans.stages))
        for x in range(int(widest.max(initial=-1)), -1, -1):  # layers of the last stage
            most = np.maximum(-(-(depth - x) // others), self.block)  # layers of another stage
            fuller = np.maximum(0, depth - x - (most - 1) * others)  # stages that have so many
            device = v * (most - 1) + np.minimum(v, -(-fuller // p))
            part = np.minimum(1.0, fuller / others)
            mean = np.maximum(most - 1 + part, 1e-9)
            varies = np.where(v > 1, (part * (1 - part)) ** 0.5 / mean, 0.0)
            seconds = np.maximum(device * layer, (v - 1) * (most - 1) * layer + x * layer + last)
            seconds = seconds * (1 + UNEVEN * varies)
            better = (x <= widest) & ((seconds < slowest) | ((seconds == slowest) & (device / depth < share)))
            share, slowest = np.where(better, device / depth, share), np.where(better, seconds, slowest)
        return np.minimum(1.0, share), slowest

    def waits(self, sent: np.ndarray) -> np.ndarray:
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

    def reduced(self, plans: Columns, params: np.ndarray, experts: np.ndarray, computing: np.ndarray) -> np.ndarray:
        """Seconds in which a device waits for collectives on gradients and parameters."""
        inner, zero = plans.inner, plans.zero
        groups = ((params - experts, inner.tp, plans.ranks), (experts, inner.size, plans.dp))  # bytes, stride, ranks
        scatter = sum(self.collectives("reduce_scatter", local, stride, ranks) for local, stride, ranks in groups)
        gather = sum(self.collectives("all_gather", local / ranks, stride, ranks) for local, stride, ranks in groups)
        both, at_once = scatter + gather, (plans.count == 1) & (plans.devices == 1)
        hidden = np.select(
            [zero == 3, zero == 2, at_once],
            [plans.count * (scatter + (2 + plans.again) * gather), plans.count * scatter, both],
            0.0,
        )
        seconds = np.select([zero == 3, zero == 2, at_once], [0.0 * both, gather, 0.0 * both], both)
        if not self.cluster.device.computes_on:
            return seconds + hidden
        yields = self.cluster.device.yields * np.minimum(hidden, computing)
        # each part of a pipeline begins with collectives
        hides = np.where(plans.devices == 1, HIDDEN, INSIDE)
        return seconds + yields + np.maximum(hidden - hides * computing, (1 - hides) * hidden)

    def collectives(self, kind: str, local: np.ndarray, stride: int, ranks: np.ndarray) -> np.ndarray:
        """Seconds of a collective of each plan. local: bytes of a rank. Equal ones are priced once."""
        pairs, where = np.unique(np.stack((local, ranks)), axis=1, return_inverse=True)
        seconds = [
            self.cluster.time(kind, sent_bytes(kind, int(size), int(k)), stride, int(k)) if k > 1 and size else 0.0
            for size, k in pairs.T
        ]
        return np.array(seconds)[where.reshape(-1)]


def most_in_flight(plans: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Return the microbatches in flight on the device with most and on the last, in units of a device's layers, as
    `slots.in_flight` counts them in the schedules of named plans."""
    p, v, count = plans.devices, plans.chunks, plans.count
    interleaved, both = plans.schedule == "interleaved", plans.schedule == "zb-v"
    most = np.where(interleaved, (2 * p - 1 + (v - 1) * p) / v, p)
    last = np.where(interleaved, ((v - 1) * p + 1) / v, np.where(both, p, 1.0))
    return np.minimum(count, most), np.minimum(count, last)


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
