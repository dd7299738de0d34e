"""Searches the named plans best estimate first, so that only a few of thousands are lowered and simulated.

Each plan has a closed-form estimate (`plan.estimate`). The search repeatedly takes the fastest estimate that fits in
memory. If its inner mesh (context, expert and tensor parallelism) has no outline yet, the outline is computed and the
affected estimates are refined. Otherwise the plan is judged, and the judgement corrects all estimates of the same sort.
Until a plan of a large step fits, a pipeline of many stages is judged instead of a plan that is about as fast: most of
its stages are equal, so that takes a fraction of the time.
The search ends when no estimate beats the fastest judged plan that fits, or when the work budget is spent.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tutti.hardware import Cluster
from tutti.plan.estimate import WHOLE, Estimator, Inner, axes_of
from tutti.plan.experts import Experts
from tutti.plan.explain import counted
from tutti.plan.families import Limits, divisors, families
from tutti.plan.kind import kind, kind_of
from tutti.plan.schedule import SPLIT
from tutti.plan.textbook import Textbook

if TYPE_CHECKING:
    from tutti.plan.search import Search

CAUTION = 0.7  # until a plan fits, each plan that did not fit scales the memory limit by this factor
TIGHT, SURE = 0.93, 0.995  # share of memory that an estimate may fill, before and after a plan of its sort is judged
BETTER = 0.98  # judge only plans whose estimate is below this share of the fastest time
LARGE = 5000  # nodes of a large step
UNLIKE = 4  # stages of a pipeline that are unlike others, about
STAGES, QUICK = 8, 1.5  # the first plan of a large step: at least so many stages, at most so many times the fastest

MATTERS = 0.3  # share of the activations of layers that attention must make for its recomputation to be tried

Sort = tuple[str, tuple[str, ...], bool]


def sort_of(book: Textbook) -> Sort:
    """The sort of a plan. Estimates of plans of one sort have similar errors."""
    pipe = "" if book.pipe.devices == 1 else "split" if book.pipe.schedule in SPLIT else "whole"
    return pipe, book.variant.recompute, book.zero == 3


@dataclass(frozen=True)
class Lean:
    """A named plan, its number of microbatches, its cluster, and its estimated peak bytes per device."""

    book: Textbook
    count: int
    cluster: Cluster
    bytes: float


@dataclass
class Correction:
    """Ratios of a judged plan to its estimate, for seconds and bytes."""

    seconds: float = 1.0
    bytes: float = 1 / TIGHT


class Leading:
    """Searches the named plans of a `Search`, best estimate first."""

    def __init__(self, search: Search, cluster: Cluster | None = None, estimator: Estimator | None = None):
        self.of, self.cluster = search, cluster or search.cluster
        self.corrections: dict[Sort, Correction] = {}
        self.missed = 0  # judged plans that do not fit
        self.begun = False
        self.first = search.accumulate or 1
        self.estimator = estimator.on(self.cluster) if estimator else search.estimator
        counts = (search.accumulate,) if search.accumulate else tuple(divisors(search.batch))
        self.entries = list(families(self.limits(counts)))
        self.open = np.ones(len(self.entries), dtype=bool)
        self.inside: dict[Inner, list[int]] = {}
        for i, (book, _) in enumerate(self.entries):
            self.inside.setdefault(Inner.of(book), []).append(i)
        self.seconds, self.bytes = np.zeros(len(self.entries)), np.zeros(len(self.entries))
        self.flat = [i for i, (book, count) in enumerate(self.entries)
                     if count == self.first and book.pipe.devices == 1 and not book.recompute]  # fmt: skip
        self.estimate(self.flat)
        self.large = len(self.estimator.planner.step.graph.nodes) > LARGE
        self.quick = np.array([self.large and book.pipe.stages >= STAGES for book, _ in self.entries], dtype=bool)
        self.outlined = np.zeros(len(self.entries), dtype=bool)
        self.outlined[self.inside.get(WHOLE, [])] = True
        sorts = [sort_of(book) for book, _ in self.entries]
        self.sorts = {sort: np.array([s == sort for s in sorts]) for sort in set(sorts)}

    def limits(self, counts: tuple[int, ...]) -> Limits:
        search, planner = self.of, self.estimator.planner
        shapes = Experts(planner.problem).shapes
        whole = self.estimator.known[WHOLE]
        norms = (o.outputs[0].shape for o in planner.problem.operators.values() if "norm" in str(o.target))
        stages = len(planner.layers) - len(planner.layers.inside)
        return Limits(self.cluster.size, self.cluster.levels[0][0], search.batch, counts, whole.depth, stages,
                      self.estimator.block, min((shape[0] for shape in shapes), default=0),
                      any(len(shape) == 3 for shape in norms),
                      whole.layers.scores > MATTERS * whole.layers.held)  # fmt: skip

    @property
    def needed(self) -> bool:
        """Whether the step is large, or no plan without a pipeline and without recomputation is estimated to fit at the
        first number of microbatches. Other plans are searched without names."""
        return self.large or bool(self.bytes[self.flat].min(initial=np.inf) > TIGHT * self.of.memory)

    def search(self) -> None:
        """Judge named plans, best estimate first."""
        self.begin()
        while (i := self.next()) is not None:
            if not self.look_at(i):
                return

    def another(self, than: tuple) -> None:
        """Judge named plans of other kinds (`plan.kind`), best estimate first, until one fits."""
        search = self.of
        self.begin()
        others = np.array([kind_of(book) != than for book, _ in self.entries])
        while (i := self.next(others)) is not None and self.look_at(i):
            if any(search.fits(plan) and kind(plan) != than for plan in search.plans):
                return

    def begin(self) -> None:
        """Estimate all entries."""
        if not self.begun:
            self.begun = True
            self.estimator.by_rows()
            self.estimate(range(len(self.entries)))

    def look_at(self, i: int) -> bool:
        """Compute the outline of an entry's inner mesh, or judge the entry if there is one. Returns False if the budget
        does not allow that."""
        search, (book, count) = self.of, self.entries[i]
        inner = Inner.of(book)
        if inner not in self.estimator.known:
            search.progress(f"estimating plans with {inner.book} inside")
            search.work.price(len(self.estimator.planner.problem.operators))
            self.refine(inner)
        elif search.affords(count, book.variant, min(1.0, UNLIKE / book.pipe.stages)):
            self.open[i] = False
            self.judge(i)
        else:
            return False
        return True

    def leanest(self) -> Lean | None:
        """The plan with the smallest estimated memory; None if no estimate is finite."""
        self.begin()
        size = np.where(np.isfinite(self.bytes), self.corrected()[1], np.inf)
        if not len(size) or not np.isfinite(size.min()):
            return None
        i = int(np.argmin(size))
        return Lean(*self.entries[i], self.cluster, float(size[i]))

    def advisable(self) -> Lean | None:
        """The fastest plan that is estimated to leave room, else the smallest that is estimated to fit, of those whose
        tensor parallelism divides a node. None if none is estimated to fit."""
        self.begin()
        seconds, size = self.corrected()
        inside = np.array([self.cluster.levels[0][0] % book.tp == 0 for book, _ in self.entries], dtype=bool)
        for share, key in ((CAUTION, seconds), (1.0, size)):
            fits = inside & (size <= share * self.of.memory)
            if fits.any():
                i = int(np.argmin(np.where(fits, key, np.inf)))
                return Lean(*self.entries[i], self.cluster, float(size[i]))
        return None

    def judge_leanest(self) -> None:
        """Judge the plan with the smallest estimated memory, unless it was judged already."""
        lean = self.leanest()
        if lean is not None and self.open[i := self.entries.index((lean.book, lean.count))]:
            self.open[i] = False
            self.judge(i)

    def next(self, among: np.ndarray | None = None) -> int | None:
        """The index of the fastest estimate that fits and beats the fastest judged plan; None if there is none.

        among: take the fastest that fits of these entries, even if it is slower.
        """
        seconds, size = self.corrected()
        room = self.of.memory
        if among is not None:
            fits = self.open & (size <= room) & among
        elif self.of.fastest is not None:
            fits = self.open & (size <= room) & (seconds < BETTER * self.of.fastest)
        else:  # each plan that did not fit makes the limit stricter
            fits = self.open & (size <= room * CAUTION**self.missed)
            if not fits.any():
                fits = self.open & (size <= room)
        if not fits.any():
            return None
        i = int(np.argmin(np.where(fits, seconds, np.inf)))
        if among is None and self.of.fastest is None and self.outlined[i] and not self.quick[i]:
            quick = fits & self.quick & self.outlined & (size <= CAUTION * room) & (seconds < QUICK * seconds[i])
            i = int(np.argmin(np.where(quick, seconds, np.inf))) if quick.any() else i
        return i

    def corrected(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds and bytes of all entries, corrected by the judged plans."""
        seconds, size = self.seconds.copy(), self.bytes.copy()
        other = min([1.0, *(c.seconds for c in self.corrections.values())])
        for sort, where in self.sorts.items():
            correction = self.corrections.get(sort, Correction(other))
            seconds[where] *= correction.seconds
            size[where] *= correction.bytes
        return seconds, size

    def estimate(self, those: Collection[int] | np.ndarray) -> None:
        self.of.work.estimate(len(those))
        for i in those:
            estimate = self.estimator.of(*self.entries[i])
            self.seconds[i], self.bytes[i] = estimate.seconds, estimate.bytes

    def refine(self, inner: Inner) -> None:
        """Compute the outline of this inner mesh and update the estimates of its plans; if it is the first with its
        axes, also those of plans with the same axes."""
        those = self.inside[inner]
        first = self.estimator.alike(inner) is None
        if not self.estimator.refine(inner):
            self.open[those] = False
            return
        self.outlined[those] = True
        if first:
            self.estimate([i for other, them in self.inside.items() if axes_of(other) == axes_of(inner) for i in them])
        else:
            self.estimate(those)

    def judge(self, i: int) -> None:
        """Lower and simulate an entry, and correct the estimates of its sort."""
        search, (book, count) = self.of, self.entries[i]
        search.progress(f"{book} with {counted(count, 'microbatch', 'microbatches')}")
        try:
            plan = search.judgement(search.planner(count, book.variant).named(str(book)))
        except ValueError as error:  # for example, the batch does not divide or the layers cannot be cut there
            search.impossible = search.impossible or error
            return
        made = plan.predicted
        self.missed += not search.fits(plan)
        if not self.corrections:  # fusion makes computation faster than the sum of its operators
            self.estimator.computes = min(1.0, made.compute_seconds / self.estimator.of(book, count).computing)
            self.estimate(np.flatnonzero(self.open))
            self.estimate([i])
        self.corrections[sort_of(book)] = Correction(
            made.step_seconds / self.seconds[i], made.peak_bytes / self.bytes[i] / SURE
        )
