"""The named plans of a cluster: every way to factor its devices over the textbook's axes, with every ZeRO stage,
schedule, recomputation, and number of microbatches that divides the batch.

Left out is what never wins: data parallelism without ZeRO, which sends as much as ZeRO-1 and keeps more; tensor
parallelism over more than two nodes; context parallelism where there are sequences enough to share out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tutti.plan.schedule import Pipe
from tutti.plan.textbook import Textbook

CHUNKS = 8  # stages on each device, at most
LONGEST = 64  # devices of a pipeline
NODES = 2  # that tensor parallelism may span
UNEVEN = 1.25  # as many layers may the fullest device of a pipeline have, compared with equal shares


@dataclass(frozen=True)
class Limits:
    """What a model and a request allow.

    batch: rows of an update. counts: numbers of microbatches. depth: numbered layers. stages: of a pipeline, at most.
    block: layers that cannot be cut apart.
    experts: what expert-parallel devices have to divide. node: devices of a node.
    """

    devices: int
    node: int
    batch: int
    counts: tuple[int, ...]
    depth: int
    stages: int
    block: int = 1
    experts: int = 0


def families(limits: Limits) -> Iterator[tuple[Textbook, int]]:
    """All named plans, with their numbers of microbatches."""
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
                crowded = n // p // tp > limits.batch  # more devices than sequences
                for cp in divisors(n // p // tp // ep) if crowded else (1,):
                    dp = n // p // tp // ep // cp
                    counts = [m for m in limits.counts if limits.batch % (m * dp * ep) == 0]
                    yield from _variants(limits, dp, cp, ep, tp, p, counts)


def _variants(limits: Limits, dp: int, cp: int, ep: int, tp: int, p: int, counts: list[int]
              ) -> Iterator[tuple[Textbook, int]]:  # fmt: skip
    pipes = list(_pipes(p, limits))
    for zero in (1, 2, 3) if dp > 1 else (0,):
        for recompute in (False, True) if limits.depth > 1 else (False,):
            for pipe in pipes:
                book = Textbook(dp, tp, zero, ep, cp, pipe, recompute)
                for m in counts:
                    if (zero == 2 and m == 1) or (pipe.schedule == "interleaved" and m % p) or (p > 1 and m < 2):
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
