"""The named plans of a search, best first: of thousands a few are lowered and simulated.

Each has an estimate in closed form (`plan.estimate`). The one that is estimated to be the fastest of those that fit is
looked at: first the mesh inside of its data parallelism and pipeline gets an outline of its own, then the plan is
judged. What the judge says corrects the estimates of all plans of its sort. That ends where no estimate beats the
fastest that fits, or with the work that may be done.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tutti.hardware import Cluster
from tutti.plan.estimate import Estimator
from tutti.plan.experts import Experts
from tutti.plan.families import Limits, divisors, families
from tutti.plan.schedule import SPLIT
from tutti.plan.textbook import Textbook

if TYPE_CHECKING:
    from tutti.plan.search import Search

CAUTION = 0.7  # of that, while nothing is known that fits, for each plan that did not
TIGHT, SURE = 0.93, 0.995  # of the memory that an estimate may fill: before plans of its sort were judged, and after
BETTER = 0.98  # of the time of the fastest: what is estimated to take longer is not judged

Sort = tuple[str, bool, bool]


def sort_of(book: Textbook) -> Sort:
    """Plans of one sort are estimated too high or too low alike."""
    pipe = "" if book.pipe.devices == 1 else "split" if book.pipe.schedule in SPLIT else "whole"
    return pipe, book.recompute, book.zero == 3


@dataclass(frozen=True)
class Lean:
    """A named plan with its number of microbatches, for a cluster, and what it is estimated to keep on a device."""

    book: Textbook
    count: int
    cluster: Cluster
    bytes: float


@dataclass
class Correction:
    """By how much a judged plan differs from its estimate, as factors of seconds and bytes."""

    seconds: float = 1.0
    bytes: float = 1 / TIGHT


class Leading:
    """Those of a search."""

    def __init__(self, search: Search, cluster: Cluster | None = None, estimator: Estimator | None = None):
        self.of, self.cluster = search, cluster or search.cluster
        self.corrections: dict[Sort, Correction] = {}
        self.missed = 0  # plans that were judged and do not fit
        self.first = search.accumulate or 1
        rows = search.batch // self.first
        self.estimator = (
            estimator.on(self.cluster) if estimator else Estimator(search.planner(self.first), self.cluster, rows)
        )
        counts = (search.accumulate,) if search.accumulate else tuple(divisors(search.batch))
        self.entries = list(families(self.limits(counts)))
        self.open = np.ones(len(self.entries), dtype=bool)
        self.seconds, self.bytes = np.zeros(len(self.entries)), np.zeros(len(self.entries))
        self.estimate(range(len(self.entries)))
        sorts = [sort_of(book) for book, _ in self.entries]
        self.sorts = {sort: np.array([s == sort for s in sorts]) for sort in set(sorts)}

    def limits(self, counts: tuple[int, ...]) -> Limits:
        search, planner = self.of, self.estimator.planner
        shapes = Experts(planner.problem).shapes
        depth = self.estimator.known[1, 1, 1].depth
        stages = len(planner.layers) - len(planner.layers.inside)
        return Limits(self.cluster.size, self.cluster.levels[0][0], search.batch, counts, depth, stages,
                      self.estimator.block, min((shape[0] for shape in shapes), default=0))  # fmt: skip

    @property
    def needed(self) -> bool:
        """Whether the first number of microbatches is too few for all plans that keep what the forward pass makes and
        have no pipeline: those that are searched without being named."""
        flat = [i for i, (book, count) in enumerate(self.entries)
                if count == self.first and book.pipe.devices == 1 and not book.recompute]  # fmt: skip
        return bool(self.bytes[flat].min(initial=np.inf) > TIGHT * self.of.memory)

    def search(self) -> None:
        """Judge those that lead."""
        search = self.of
        while (i := self.next()) is not None:
            book, count = self.entries[i]
            inner = book.cp, book.ep, book.tp
            if inner not in self.estimator.known:
                search.progress(f"estimating plans with {Textbook(cp=book.cp, ep=book.ep, tp=book.tp)} inside")
                search.work.price(len(self.estimator.planner.problem.operators))
                self.refine(inner)
                continue
            if not search.affords(count, book.variant):
                return
            self.open[i] = False
            self.judge(i)

    def leanest(self) -> Lean | None:
        """The plan that is estimated to need the least memory."""
        size = np.where(np.isfinite(self.bytes), self.corrected()[1], np.inf)
        if not len(size) or not np.isfinite(size.min()):
            return None
        i = int(np.argmin(size))
        return Lean(*self.entries[i], self.cluster, float(size[i]))

    def judge_leanest(self) -> None:
        """Judge what needs the least memory, unless that is known."""
        lean = self.leanest()
        if lean is not None and self.open[i := self.entries.index((lean.book, lean.count))]:
            self.open[i] = False
            self.judge(i)

    def next(self) -> int | None:
        """The entry that is estimated to be the fastest of those that fit, and faster than what was found."""
        seconds, size = self.corrected()
        room = self.of.memory
        if self.of.fastest is not None:
            fits = self.open & (size <= room) & (seconds < BETTER * self.of.fastest)
        else:  # each that does not fit leaves less to chance
            fits = self.open & (size <= room * CAUTION**self.missed)
            if not fits.any():
                fits = self.open & (size <= room)
        return int(np.argmin(np.where(fits, seconds, np.inf))) if fits.any() else None

    def corrected(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds and bytes of all entries, as far as judged plans tell."""
        seconds, size = self.seconds.copy(), self.bytes.copy()
        other = min([1.0, *(c.seconds for c in self.corrections.values())])
        for sort, where in self.sorts.items():
            correction = self.corrections.get(sort, Correction(other))
            seconds[where] *= correction.seconds
            size[where] *= correction.bytes
        return seconds, size

    def estimate(self, those: Iterable[int]) -> None:
        for i in those:
            estimate = self.estimator.of(*self.entries[i])
            self.seconds[i], self.bytes[i] = estimate.seconds, estimate.bytes

    def refine(self, inner: tuple[int, int, int]) -> None:
        """Estimate the plans with this mesh inside anew."""
        those = [i for i, (book, _) in enumerate(self.entries) if (book.cp, book.ep, book.tp) == inner]
        if self.estimator.refine(inner):
            self.estimate(those)
        else:
            self.open[those] = False

    def judge(self, i: int) -> None:
        """Lower and simulate an entry, and learn from it."""
        search, (book, count) = self.of, self.entries[i]
        search.progress(f"{book} with {count} microbatches")
        try:
            plan = search.judgement(search.planner(count, book.variant).named(str(book)))
        except ValueError as error:  # a batch that does not divide, layers that cannot be cut there
            search.impossible = search.impossible or error
            return
        made = plan.predicted
        self.missed += not search.fits(plan)
        if not self.corrections:  # what is fused takes less than one operator after the other
            self.estimator.computes = min(1.0, made.compute_seconds / self.estimator.of(book, count).computing)
            self.estimate(np.flatnonzero(self.open))
            self.estimate([i])
        self.corrections[sort_of(book)] = Correction(
            made.step_seconds / self.seconds[i], made.peak_bytes / self.bytes[i] / SURE
        )
