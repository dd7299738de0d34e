"""The number of microbatches of a named plan: the fastest that fits, else the one that lacks least memory.

Closed-form estimates (`plan.search.estimate`) rank the numbers that the batch divides into. The first of them is
simulated. Its simulation corrects the estimated memory of the others. If it does not fit, one that needs less memory is
simulated next; if it fits, one that is estimated to be faster and, after the correction, to fit as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tutti.hardware import Cluster
from tutti.plan.layouts.roles import UndividedBatch
from tutti.plan.plan import Plan
from tutti.plan.search.estimate import Columns, Inner
from tutti.plan.search.families import divisors
from tutti.plan.search.leading import TIGHT
from tutti.plan.textbook import Textbook, parse_name, with_recompute
from tutti.plan.variant import LAYERS

if TYPE_CHECKING:
    from tutti.plan.search.search import Search

TRIES = 4  # numbers of microbatches that are simulated
LEAST_GAIN = 0.02  # fraction of the estimated seconds that another simulation must promise
AWAY = ("optimizer state", "parameters", "activations")  # what is outside of the device, by level of offloading


@dataclass(frozen=True)
class Guess:
    """A number of microbatches, and the estimated seconds of a step and bytes of a device."""

    count: int
    seconds: float = 0.0
    bytes: float = 0.0


def named(search: Search, name: str, recompute: Sequence[str] = ()) -> Plan:
    """The simulated plan of a name, with `search.accumulate` microbatches or, if that is None, the best number.

    Raises ValueError if no number of microbatches is possible.
    """
    error, chosen, failures = 1 / TIGHT, None, {}
    left = [Guess(search.accumulate or 1)]
    if search.accumulate is None and search.batch > 1:
        book = parse_name(name, search.cluster.size)
        if recompute:
            book = replace(book, recompute=True, again=() if LAYERS in recompute else tuple(recompute))
        search.progress(f"estimating {name} with different numbers of microbatches")
        left = guesses(search, book) or left
    for _ in range(TRIES):
        tried = None
        while tried is None and (guess := best(left, search.memory / error)):
            left.remove(guess)
            try:
                variant = with_recompute(name, search.cluster.size, recompute)
                tried = search.judgement(search.planner(guess.count, variant).named(name))
            except ValueError as failure:  # the batch does not divide, or too few microbatches for a pipeline
                failures[guess.count] = failure
                continue
            error = tried.predicted.peak_bytes / (guess.bytes or 1.0)
            fits = search.fits(tried)
            left = [other for other in left if (faster(other, guess) if fits else other.bytes < guess.bytes)]
        if tried is None:
            break
        chosen = tried if chosen is None else min(chosen, tried, key=search.rank)
        if search.fits(chosen):
            left = [other for other in left if other.bytes * error <= search.memory]
        if search.stop():
            break
    if chosen is None:
        undivided = [count for count in sorted(failures) if isinstance(failures[count], UndividedBatch)]
        raise failures[undivided[0] if undivided else max(failures)]
    return chosen


def faster(other: Guess, guess: Guess) -> bool:
    """True if a simulation of `other` could pay: the estimates differ by more than their usual error."""
    return other.seconds < (1 - LEAST_GAIN) * guess.seconds


def best(left: Iterable[Guess], room: float) -> Guess | None:
    """The fastest that fits into so many bytes, else the smallest; None of none."""

    def key(guess: Guess) -> tuple[bool, float]:
        fits = guess.bytes <= room
        return not fits, guess.seconds if fits else guess.bytes

    return min(left, key=key, default=None)


def guesses(search: Search, book: Textbook, cluster: Cluster | None = None) -> list[Guess]:
    """The numbers of microbatches that divide the batch for a named plan, with their estimates.

    cluster: a cluster of another number of the same devices.
    """
    counts = [n for n in divisors(search.batch) if search.batch % (n * book.dp * book.ep) == 0]
    if not counts:
        return []
    estimator = search.estimator.on(cluster) if cluster else search.estimator
    estimator.refine(Inner.of(book))
    estimator.by_rows()
    estimates = estimator.of(Columns.of([(book, count) for count in counts]))
    here = np.sum([size for kind, size in estimates.kinds.items() if kind not in AWAY[: book.offload]], axis=0)
    return list(map(Guess, counts, estimates.seconds.tolist(), here.tolist()))
