"""A load on engines, simulated: the engine's own scheduler, with a clock in place of devices.

Engines are colocated (each does everything), or some compute prompts and send their KV caches to others that generate
(Zhong et al., "DistServe", 2024). Requests go to the engine with the least to do.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from tutti.serve.apart.replicas import route
from tutti.serve.bench import Arrival, Measured
from tutti.serve.cache.blocks import BlockPool
from tutti.serve.engine.request import Request
from tutti.serve.engine.scheduler import Batch, Scheduler
from tutti.serve.engine.sequence import TokenSequence
from tutti.serve.values import JsonValue

Cost = Callable[[Sequence[tuple[int, int]]], float]  # of a step: (new tokens, tokens with those before) by sequence


@dataclass(frozen=True)
class Sizes:
    """Sizes of an engine: blocks of its cache and their tokens, tokens of a step, sequences at once."""

    blocks: int
    block: int = 16
    budget: int = 512
    most: int = 32


class SimulatedEngine:
    """An engine with a clock. cost: seconds of a step. hands_on: whether sequences leave after their first token."""

    def __init__(self, sizes: Sizes, cost: Cost, hands_on: bool = False):
        self.pool = BlockPool(sizes.blocks, sizes.block)
        self.scheduler = Scheduler(self.pool, None, sizes.budget, sizes.most)
        self.arriving: list[TokenSequence] = []  # sequences whose caches wait for room
        self.cost, self.hands_on, self.busy, self.steps = cost, hands_on, False, 0
        self.seconds = 0.0

    @property
    def load(self) -> int:
        """Number of sequences."""
        return len(self.scheduler.running) + len(self.scheduler.waiting) + len(self.arriving)

    def arrive(self, sequence: TokenSequence) -> None:
        """A new sequence, or one whose cache comes with it."""
        if sequence.computed:
            self.arriving.append(sequence)
        else:
            self.scheduler.add(sequence)

    def begin(self) -> tuple[Batch, float] | None:
        """The next step and its seconds; None if there is nothing to do."""
        while self.arriving and self.scheduler.place(self.arriving[0], self.arriving[0].computed):
            del self.arriving[0]
        batch = self.scheduler.schedule()
        if not batch.pieces:
            return None
        taken = self.cost([(x.count, x.start + x.count) for x in batch.pieces])
        self.steps += 1
        self.seconds += taken
        return batch, taken


def simulate(
    arrivals: Sequence[Arrival],
    engines: Sequence[SimulatedEngine],
    receivers: Sequence[SimulatedEngine] = (),
    transfer: Callable[[int], float] = lambda tokens: 0.0,
) -> list[Measured]:
    """What clients of these engines see.

    receivers: engines that generate what `engines`, which then only compute prompts, hand on. transfer: seconds to send
    the cache of so many tokens.
    """
    number, fresh = count(), count(1 << 40)
    measured = [Measured(x) for x in arrivals]
    events: list[tuple[float, int, str, Any]] = []

    def at(time: float, kind: str, what: JsonValue) -> None:
        heapq.heappush(events, (time, next(number), kind, what))

    def begin(engine: SimulatedEngine, now: float) -> None:
        if not engine.busy and (begun := engine.begin()):
            engine.busy = True
            at(now + begun[1], "computed", (engine, begun[0]))

    for i, arrival in enumerate(arrivals):
        at(arrival.at, "arrives", i)
    while events:
        now, _, kind, what = heapq.heappop(events)
        if kind == "arrives":
            length = measured[what].arrival.prompt
            assert isinstance(length, int), "simulated prompts are numbers of tokens"
            prompt = [next(fresh) for _ in range(length)]
            sequence = TokenSequence(Request(prompt, id=str(what), arrival=now), 0, list(prompt), length)
            engine = engines[route([0] * len(engines), [x.load for x in engines])]
            needed = engine.pool.needed(length + measured[what].arrival.tokens)
            if needed > min(x.pool.count for x in (*engines, *receivers)):
                measured[what].status, measured[what].error = 400, "longer than the cache"
                continue
            engine.arrive(sequence)
            begin(engine, now)
        elif kind == "handed on":
            engine = receivers[route([0] * len(receivers), [x.load for x in receivers])]
            engine.arrive(what)
            begin(engine, now)
        else:
            engine, batch = what
            engine.busy = False
            for piece in batch.pieces:
                sequence = piece.sequence
                sequence.computed = piece.start + piece.count
                if piece.ends and _token(engine, sequence, measured[int(sequence.request.id)], now):
                    at(now + transfer(sequence.computed), "handed on", sequence)
            begin(engine, now)
    return measured


def _token(engine: SimulatedEngine, sequence: TokenSequence, seen: Measured, now: float) -> bool:
    """A token is generated. Whether the sequence leaves the engine for another."""
    seen.times.append(now)
    seen.status, seen.tokens = 200, seen.tokens + 1
    sequence.tokens.append(0)
    if seen.tokens >= seen.arrival.tokens:
        seen.end = now
        engine.scheduler.remove(sequence)
    elif engine.hands_on:
        computed = sequence.computed
        engine.scheduler.remove(sequence)
        sequence.computed = computed
        return True
    return False
