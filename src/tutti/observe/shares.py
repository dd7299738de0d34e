"""Where the time of recorded steps went on each rank: computing, communicating and waiting."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from tutti.observe.recording import Collective, RecordedRun, Recording


@dataclass
class Share:
    """Seconds of one rank per step, averaged over the recorded steps.

    computing: by kind of call. moving: blocked while data is transferred, by kind and axis. waiting: blocked by ranks
    that came late to a collective, by that rank. passing: blocked by another device of a pipeline. other: outside any
    call, in Python and copies of the batch. seconds: seconds of the whole step.
    """

    seconds: float = 0.0
    computing: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    moving: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    waiting: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    passing: float = 0.0

    @property
    def other(self) -> float:
        accounted = (*self.computing.values(), *self.moving.values(), *self.waiting.values(), self.passing)
        return max(0.0, self.seconds - sum(accounted))


def shares(recording: Recording) -> list[Share]:
    """The share of each rank."""
    shares_of_ranks = [Share() for _ in recording.ranks]
    part = 1 / len(recording.steps)
    for step in recording.steps:
        came = arrivals(recording, step)
        for share, (_, taken) in zip(shares_of_ranks, recording.of(step), strict=True):
            share.seconds += part * taken.seconds
            share.passing += part * sum(end - begin for _, _, begin, end in taken.waits)
            for block in taken.blocks:
                took = block.end - block.begin
                if block.call.computes:
                    share.computing[block.call.kind] += part * took
                    continue
                last, waited = late(block, came)
                if waited:
                    share.waiting[last] += part * waited
                kind = block.collective.kind if block.collective else block.call.kind
                axis = block.collective.axis if block.collective else block.call.axis
                share.moving[kind, axis] += part * (took - waited)
    return shares_of_ranks


def arrivals(recording: Recording, step: int) -> dict[Collective, dict[int, float]]:
    """When the ranks of each collective of a step reached it."""
    begins: dict[Collective, dict[int, float]] = defaultdict(dict)
    for rank, taken in recording.of(step):
        for block in taken.blocks:
            if block.call.axis and block.collective:
                begins[block.collective][rank.rank] = block.begin
    return begins


def late(block: RecordedRun, came: Mapping[Collective, Mapping[int, float]]) -> tuple[int, float]:
    """(last rank to reach the collective of a block, seconds the block waited for it)."""
    by = came.get(block.collective, {}) if block.collective and not block.begins else {}
    last = max(by, key=by.__getitem__, default=-1)
    return last, min(max(by[last] - block.begin, 0.0), block.end - block.begin) if by else 0.0
