"""List scheduling of pipelines with a split backward pass: each device takes the slot that can begin first.

Among slots that can begin at the same time, backward passes come first, then forward passes, then gradients of weights.
If durations differ between stages, other orders or a short wait may end earlier. `auto` takes the one that ends first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import permutations
from math import inf

from tutti.plan.pipeline.slots import Durations, Schedule, Slot, makespan, ready, taking

EQUAL = (1.0, 1.0, 1.0, 0.0)  # durations of a stage
PATIENCE = (0.0, 0.5)  # waiting times to try, as shares of the mean duration


def listed(
    place: Sequence[int], microbatches: int, most: int, durations: Durations = (), order: str = "BFW",
    patience: float = 0.0,
) -> tuple[tuple[Slot, ...], ...]:  # fmt: skip
    """The slots of each device.

    place: the device of each stage.
    most: maximum number of microbatches of a stage between F and W.
    durations: durations of the stages; by default all take equally long.
    order: priority of kinds that can begin within `patience` seconds of the first that can.
    """
    return _Lister(place, microbatches, most, durations or [EQUAL] * len(place), order, patience).run()


@lru_cache(maxsize=64)
def best_listed(
    place: Sequence[int], microbatches: int, most: int, durations: Durations
) -> tuple[tuple[Slot, ...], ...]:
    """The slots of the order that ends first, among several."""

    def tried() -> Iterator[tuple[tuple[Slot, ...], ...]]:
        yield listed(place, microbatches, most)
        mean = sum(sum(stage[:3]) for stage in durations) / (3 * len(durations))
        for order in permutations("BFW"):
            for share in PATIENCE:
                yield listed(place, microbatches, most, durations, "".join(order), share * mean)

    return min(tried(), key=lambda slots: makespan(Schedule("", slots, tuple(place), split=True), durations))


class _Lister:
    def __init__(self, place: Sequence[int], microbatches: int, most: int, durations: Durations, order: str,
                 patience: float):  # fmt: skip
        self.place, self.microbatches, self.most, self.durations = place, microbatches, most, durations
        self.order, self.patience, self.stages = order, patience, len(place)
        self.mine = [[s for s in range(self.stages) if place[s] == d] for d in range(1 + max(place))]
        self.next_of = {(kind, s): 0 for kind in "FBW" for s in range(self.stages)}
        self.over: dict[Slot, float] = {}
        self.free = [0.0] * len(self.mine)

    def run(self) -> tuple[tuple[Slot, ...], ...]:
        slots: list[list[Slot]] = [[] for _ in self.mine]
        coming = [self.first(d) for d in range(len(self.mine))]
        for _ in range(3 * self.microbatches * self.stages):
            begin, *_, slot, d = min((*can, d) for d, can in enumerate(coming) if can)
            self.over[slot] = self.free[d] = begin + taking(slot, self.durations, True)
            self.next_of[slot.kind, slot.stage] += 1
            slots[d].append(slot)
            around = {slot.stage - 1, slot.stage, slot.stage + 1} & set(range(self.stages))
            for device in {self.place[s] for s in around}:
                coming[device] = self.first(device)
        return tuple(map(tuple, slots))

    def first(self, device: int) -> tuple[float, int, int, Slot] | None:
        """The slot that a device should begin next, as (begin, rank, -stage, slot); None if none can begin."""
        can = []
        for s in self.mine[device]:
            full = self.next_of["F", s] - self.next_of["W", s] >= self.most
            for rank, kind in enumerate(self.order):
                slot = Slot(kind, s, self.next_of[kind, s])
                if slot.microbatch == self.microbatches or (kind == "F" and full):
                    continue
                there = ready(slot, self.over, self.durations, self.place)
                if there < inf:
                    can.append((max(self.free[device], there), rank, -s, slot))
        soon = min(can, default=(0.0,))[0] + self.patience
        among = [each for each in can if each[0] <= soon]
        return min(among, key=lambda each: each[1:] if self.patience else each, default=None)
