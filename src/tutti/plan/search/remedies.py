"""What makes a named plan fit that does not: more microbatches, recomputation, ZeRO-3 or more devices, by estimate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from tutti.hardware import Cluster
from tutti.plan.explain import size
from tutti.plan.pipeline.schedule import SPLIT
from tutti.plan.plan import Plan
from tutti.plan.search.microbatches import Guess, best, guesses
from tutti.plan.textbook import Textbook, parse_name

if TYPE_CHECKING:
    from tutti.plan.search.search import Search

DOUBLINGS = 3  # of the devices
GENERAL = "leave out --plan to search for one that fits, or give more devices"
NOTHING = (
    "neither other microbatches, recompute, zero3 nor up to 8 times the devices are estimated to make it fit: leave "
    "out --plan to search for another"
)


def remedies(search: Search, plan: Plan) -> str:
    """What is estimated to fit instead of a named plan that does not, in words. Estimates are corrected as the estimate
    of this plan would have to be."""
    try:
        book = parse_name(plan.name, search.cluster.size)
    except ValueError:  # no named plan
        return GENERAL
    here = next((guess for guess in guesses(search, book) if guess.count == plan.accumulate), None)
    if here is None or plan.tiers:
        return GENERAL
    room = search.memory * here.bytes / plan.predicted.peak_bytes
    offers = [f"--plan {other} --accumulate {guess.count} ({size(guess.bytes * search.memory / room)})"
             for other in smaller(book) if (guess := fitting(search, other, room))]  # fmt: skip
    for other, cluster in larger(book, search.cluster):
        if guess := fitting(search, other, room, cluster):
            need = size(guess.bytes * search.memory / room)
            offers.append(f"--cluster {cluster} --plan {other} --accumulate {guess.count} ({need})")
            break
    return f"estimated to fit: {'; '.join(offers)}" if offers else NOTHING


def fitting(search: Search, book: Textbook, room: float, cluster: Cluster | None = None) -> Guess | None:
    """The fastest number of microbatches that is estimated to need at most `room` bytes."""
    guess = best(guesses(search, book, cluster), room)
    return guess if guess and guess.bytes <= room else None


def smaller(book: Textbook) -> Iterator[Textbook]:
    """This plan, for other numbers of microbatches, and plans like it that need less memory on the same devices."""
    again = not book.recompute and book.pipe.schedule not in SPLIT
    zero = book.zero < 3 and book.dp * book.cp * book.ep > 1
    yield book
    if again:
        yield replace(book, recompute=True)
    if zero:
        yield replace(book, zero=3)
    if again and zero:
        yield replace(book, zero=3, recompute=True)


def larger(book: Textbook, cluster: Cluster) -> Iterator[tuple[Textbook, Cluster]]:
    """This plan with more data parallelism on more devices."""
    for times in (2**i for i in range(1, DOUBLINGS + 1)):
        with suppress(ValueError):  # this number of devices does not fill whole nodes
            yield replace(book, dp=times * book.dp, zero=book.zero or 1), cluster.of(times * cluster.size)
