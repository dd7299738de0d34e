"""Searches the named plans best estimate first, so that only a few of thousands are lowered and simulated.

Each plan has a closed-form estimate (`plan.search.estimate`). The search repeatedly takes the fastest estimate that
fits in memory. If its inner mesh (context, expert and tensor parallelism) has no outline yet, the outline is computed
and the affected estimates are refined. Otherwise the plan is judged, and the judgement corrects all estimates of the
same sort.
Of a large step, a pipeline of many stages is judged before plans that are about as fast: most of its stages are equal,
so that takes a fraction of the time. Until a plan fits, few outlines are computed.
The search ends when no estimate beats the fastest judged plan that fits, or when the work budget is spent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tutti.hardware import Cluster
from tutti.plan import explain
from tutti.plan.layouts.experts import Experts
from tutti.plan.pipeline.schedule import SPLIT
from tutti.plan.search.estimate import WHOLE, Columns, Estimator, Inner, axes_of
from tutti.plan.search.families import Limits, divisors, families
from tutti.plan.search.kind import kind, kind_of
from tutti.plan.textbook import Textbook

if TYPE_CHECKING:
    from tutti.plan.search.search import Search

CAUTION = 0.7  # until a plan fits, each plan that did not fit scales the memory limit by this factor
TIGHT, SURE = 0.93, 0.995  # share of memory that an estimate may fill, before and after a plan of its sort is judged
BETTER = 0.98  # judge only plans whose estimate is below this share of the fastest time
LARGE = 5000  # nodes of a large step
UNLIKE = 4  # stages of a pipeline that are unlike others, about
STAGES = 8  # pipelines of at least so many stages are simulated in a fraction of the time
FIRST, LATER = 1.5, 1.1  # they come before plans that are faster by less than this factor: until a plan fits, and later
OUTLINES = 3  # number of inner meshes with an outline after which the first plan of a large step is judged

MATTERS = 0.3  # share of the activations of layers that attention must make for its recomputation to be tried

Sort = tuple[str, tuple[str, ...], bool, bool]


def sort_of(book: Textbook) -> Sort:
    """The sort of a plan. Estimates of plans of one sort have similar errors."""
    pipe = "" if book.pipe.devices == 1 else "split" if book.pipe.schedule in SPLIT else "whole"
    return pipe, book.variant.recompute, book.zero == 3, book.folded or book.ep > 1


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
        inside: dict[Inner, list[int]] = {}
        for i, (book, _) in enumerate(self.entries):
            inside.setdefault(Inner.of(book), []).append(i)
        self.inside = {inner: np.array(those) for inner, those in inside.items()}
        self.columns = {inner: Columns.of([self.entries[i] for i in those]) for inner, those in inside.items()}
        self.seconds, self.bytes = np.zeros(len(self.entries)), np.zeros(len(self.entries))
        self.flat = np.array([count == self.first and book.pipe.devices == 1 and not book.recompute
                              for book, count in self.entries], dtype=bool)  # fmt: skip
        self.estimate(self.flat)
        self.large = len(self.estimator.planner.step.graph.nodes) > LARGE
        self.stages = np.array([book.pipe.stages for book, _ in self.entries])
        self.quick = self.large & (self.stages >= STAGES)
        self.outlined = np.zeros(len(self.entries), dtype=bool)
        self.outlined[self.inside.get(WHOLE, [])] = True
        sorts = [sort_of(book) for book, _ in self.entries]
        self.sorts = {sort: np.array([s == sort for s in sorts]) for sort in set(sorts)}

    def limits(self, counts: tuple[int, ...]) -> Limits:
        search, planner = self.of, self.estimator.planner
        shapes = Experts(planner.problem).shapes
        whole = self.estimator.outlines[WHOLE]
        norms = (o.outputs[0].shape for o in planner.problem.operators.values() if "norm" in str(o.target))
        stages = len(planner.layers) - len(planner.layers.inside)
        return Limits(self.cluster.size, self.cluster.levels[0][0], search.batch, counts, whole.depth, stages,
                      self.estimator.block, min((shape[0] for shape in shapes), default=0),
                      any(len(shape) == 3 for shape in norms),
                      whole.layers.scores > MATTERS * whole.layers.activations)  # fmt: skip

    @property
    def needed(self) -> bool:
        """Whether the step is large, or no plan without a pipeline and without recomputation is estimated to fit at the
        first number of microbatches. Other plans are searched without names."""
        return self.large or bool(self.bytes[self.flat].min(initial=np.inf) > TIGHT * self.of.memory)

    def search(self) -> None:
        """Judge named plans, best estimate first."""
        self.begin()
        while (i := self.next()) is not None:
            self.look_at(i)

    def another(self, than: tuple) -> None:
        """Judge named plans of other kinds (`plan.search.kind`), best estimate first, until one fits."""
        search = self.of
        self.begin()
        others = np.array([kind_of(book) != than for book, _ in self.entries])
        while (i := self.next(others)) is not None:
            self.look_at(i)
            if any(search.fits(plan) and kind(plan) != than for plan in search.plans):
                return

    def begin(self) -> None:
        """Estimate all entries."""
        if not self.begun:
            self.begun = True
            self.estimator.by_rows()
            self.estimate(np.ones(len(self.entries), dtype=bool))

    def look_at(self, i: int) -> None:
        """Compute the outline of an entry's inner mesh, or judge the entry if there is one. Close the entry if the
        budget does not allow that."""
        search, (book, count) = self.of, self.entries[i]
        inner = Inner.of(book)
        if inner not in self.estimator.outlines:
            search.progress(f"estimating plans with {inner.book} inside")
            search.work.price(len(self.estimator.planner.problem.operators))
            self.refine(inner)
        elif search.affords(count, book.variant, min(1.0, UNLIKE / book.pipe.stages)):
            self.open[i] = False
            self.judge(i)
        else:  # nor are pipelines of fewer stages, of which more are unlike others
            self.open &= self.stages > book.pipe.stages

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
        room, fastest = self.of.memory, self.of.fastest
        if among is not None:
            fits = self.open & (size <= room) & among
        elif fastest is not None:
            fits = self.open & (size <= room) & (seconds < BETTER * fastest)
        else:  # each plan that did not fit makes the limit stricter
            fits = self.open & (size <= room * CAUTION**self.missed)
            if not fits.any():
                fits = self.open & (size <= room)
        if not fits.any():
            return None
        if self.large and among is None:
            factor, share = (LATER, 1.0) if fastest is not None else (FIRST, CAUTION)
            quick = fits & self.quick & (seconds < factor * seconds[fits].min()) & (size <= share * room)
            fits = quick if quick.any() else fits
            if fastest is None and len(self.estimator.outlines) >= OUTLINES and (fits & self.outlined).any():
                fits = fits & self.outlined
        return int(np.argmin(np.where(fits, seconds, np.inf)))

    def corrected(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds and bytes of all entries, corrected by the judged plans."""
        seconds, size = self.seconds.copy(), self.bytes.copy()
        other = min([1.0, *(c.seconds for c in self.corrections.values())])
        for sort, where in self.sorts.items():
            correction = self.corrections.get(sort, Correction(other))
            seconds[where] *= correction.seconds
            size[where] *= correction.bytes
        return seconds, size

    def estimate(self, those: np.ndarray) -> None:
        """Estimate the entries where the mask `those` is true."""
        self.of.work.estimate(int(those.sum()))
        for inner, entries in self.inside.items():
            if (chosen := those[entries]).any():
                estimates = self.estimator.of(self.columns[inner][chosen])
                self.seconds[entries[chosen]], self.bytes[entries[chosen]] = estimates.seconds, estimates.bytes

    def refine(self, inner: Inner) -> None:
        """Compute the outline of this inner mesh and update the estimates of its plans; if it is the first with its
        axes, also those of plans with the same axes."""
        first = self.estimator.alike(inner) is None
        if not self.estimator.refine(inner):
            self.open[self.inside[inner]] = False
            return
        self.outlined[self.inside[inner]] = True
        those = np.zeros(len(self.entries), dtype=bool)
        for other, entries in self.inside.items():
            those[entries] = other == inner or (first and axes_of(other) == axes_of(inner))
        self.estimate(those)

    def judge(self, i: int) -> None:
        """Lower and simulate an entry, and correct the estimates of its sort."""
        search, (book, count) = self.of, self.entries[i]
        about = f"about {explain.seconds(self.seconds[i])} a step and {explain.size(self.bytes[i])}"
        microbatches = explain.counted(count, "microbatch", "microbatches")
        search.progress(f"{book} with {microbatches}: estimated {about}")
        try:
            plan = search.judgement(search.planner(count, book.variant).named(str(book)))
        except ValueError as error:  # for example, the batch does not divide or the layers cannot be cut there
            search.impossible = search.impossible or error
            return
        prediction = plan.predicted
        self.missed += not search.fits(plan)
        if not self.corrections:  # fusion makes computation faster than the sum of its operators
            computing = self.estimator.of(Columns.of([(book, count)])).computing[0]
            self.estimator.computes = min(1.0, prediction.compute_seconds / computing)
            judged = np.arange(len(self.entries)) == i
            self.estimate(self.open | judged)
        self.corrections[sort_of(book)] = Correction(
            prediction.step_seconds / self.seconds[i], prediction.peak_bytes / self.bytes[i] / SURE
        )
