"""The named plans for a cluster: all combinations of mesh axes, ZeRO stages, schedules, recomputation and microbatches.

Residuals are split along the sequence (`sp`) or not, experts are spread over `ep`, or whole over a part of dp x tp
(`experts8`), and layers, attention or nothing is recomputed.

Plans that never win are omitted: data parallelism without ZeRO, which sends as much as ZeRO-1 and uses more memory;
tensor parallelism over more than two nodes; pipelines with fewer microbatches than half of their devices; context
parallelism when there is a sequence for every device; and recomputation where the backward pass is split, which keeps
what was recomputed until the gradients of weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tutti.plan.pipeline.schedule import SPLIT, Pipe
from tutti.plan.textbook import Textbook
from tutti.plan.variant import ATTENTION

CHUNKS = 8  # maximum number of stages per device
LONGEST = 64  # maximum number of pipeline devices
NODES = 2  # maximum number of nodes that tensor parallelism spans
UNEVEN = 1.25  # maximum ratio of the fullest device's layers to an equal share


@dataclass(frozen=True)
class Limits:
    """Limits of the model and of the request.

    devices: devices of the cluster; node: devices of a node.
    batch: rows of an update.
    counts: numbers of microbatches to try.
    depth: number of numbered layers.
    stages: maximum number of pipeline stages.
    block: longest run of layers that cannot be cut.
    experts: number of experts, which the expert-parallel axis must divide; 0 if the model has none.
    residuals: whether `sp` can split a residual stream along the sequence.
    attention: whether recomputation of attention frees memory.
    """

    devices: int
    node: int
    batch: int
    counts: tuple[int, ...]
    depth: int
    stages: int
    block: int = 1
    experts: int = 0
    residuals: bool = False
    attention: bool = False


def families(limits: Limits) -> Iterator[tuple[Textbook, int]]:
    """Yields all named plans, each with a number of microbatches."""
    n = limits.devices
    for p in divisors(n):
        if p > min(limits.depth, limits.stages, LONGEST):
            break
        for tp in divisors(n // p):
            if tp > NODES * limits.node:
                break
            for ep in divisors(n // p // tp):
                if ep > 1 and (not limits.experts or limits.experts % ep):
                    continue
                crowded = n // p // tp > limits.batch  # there are more devices than sequences
                for cp in divisors(n // p // tp // ep) if crowded else (1,):
                    dp = n // p // tp // ep // cp
                    counts = [m for m in limits.counts if limits.batch % (m * dp * ep) == 0]
                    for sp in (False, True) if limits.residuals and 1 < tp <= limits.node and cp == 1 else (False,):
                        yield from _variants(limits, Textbook(dp, tp, 0, ep, cp, sp=sp), p, counts)
                    if tp > 1 and cp == 1 and limits.experts and limits.experts % (ep * tp) == 0:
                        yield from _variants(limits, Textbook(dp, tp, 0, ep, folded=True), p, counts)


def _variants(limits: Limits, inner: Textbook, p: int, counts: list[int]) -> Iterator[tuple[Textbook, int]]:
    pipes = list(_pipes(p, limits))
    again: list[tuple[bool, tuple[str, ...]]] = [(False, ())]
    again += [(True, ())] if limits.depth > 1 else []
    again += [(True, (ATTENTION,))] if limits.attention else []
    for zero in (1, 2, 3) if inner.dp * inner.cp * inner.ep > 1 else (0,):
        for recompute, what in again:
            for pipe in pipes:
                book = replace(inner, zero=zero, pipe=pipe, recompute=recompute, again=what)
                for m in counts:
                    if (
                        (zero == 2 and m == 1)
                        or (pipe.schedule == "interleaved" and m % p)
                        or (p > 1 and m < max(2, p // 2))
                    ):
                        continue
                    if recompute and pipe.schedule in SPLIT:
                        continue
                    yield book, m


def _pipes(p: int, limits: Limits) -> Iterator[Pipe]:
    if p == 1:
        yield Pipe(1)
        return
    yield Pipe(p)
    for v in range(2, CHUNKS + 1):
        fullest = max(limits.block, -(-limits.depth // (p * v)))
        if p * v <= limits.stages and fullest * p * v <= UNEVEN * limits.depth:
            yield Pipe(p, "interleaved", v)
            if v == 2:
                yield Pipe(p, "zb-v", 2)


def divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]
