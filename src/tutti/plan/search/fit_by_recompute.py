"""Makes plans that are fast but do not fit smaller by recomputation (`plan.search.recompute`).

Activations are recomputed for as many bytes as the plan exceeds the memory. Layouts and the cut of a pipeline are
searched again for the resulting step. More is recomputed while the plan does not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from tutti.ir.step_graph import FORWARD, Call
from tutti.plan.pipeline.candidate import PipelineCandidate
from tutti.plan.plan import Plan
from tutti.plan.search.recompute import Activations
from tutti.plan.variant import Variant

if TYPE_CHECKING:
    from tutti.plan.search.search import Search

MOST = 3  # maximum number of plans to make smaller
TRIES = 4  # attempts for each plan
ACTIVATIONS = "activations"  # the kind of memory that recomputation reduces


class Smaller:
    """Searches plans with recomputation for a `Search`."""

    def __init__(self, search: Search):
        self.of = search
        self.activations = cache(self._activations)

    def search(self) -> None:
        """Try the fastest plans that do not fit and the smallest one, within the budget."""
        search = self.of
        large = [plan for plan in search.plans if not search.fits(plan) and not plan.recompute]
        alike: dict[tuple, Plan] = {}  # the fastest plan for each mesh, number of microbatches and pipeline
        for plan in sorted(large, key=lambda p: p.predicted.step_seconds):
            alike.setdefault((*plan.mesh.items(), plan.accumulate, str(plan.pipe)), plan)
        fastest = list(alike.values())
        smallest = sorted(fastest[MOST:], key=lambda p: p.predicted.peak_bytes)[:1]
        for plan in [*fastest[:MOST], *smallest]:
            if search.late or search.slower(plan.predicted.step_seconds / search.fused):
                return
            self.shrink(plan)

    def shrink(self, plan: Plan) -> None:
        """Recompute more of a plan until it fits or nothing is left to recompute."""
        search, smaller, share = self.of, plan, 1.0
        tried: set[tuple[str, ...]] = {()}
        activations, seconds = self.activations(plan.accumulate, plan.sequence_chunks)
        for _ in range(TRIES):
            activation_bytes = plan.predicted.bytes_by_kind.get(ACTIVATIONS, 0)
            share -= (smaller.predicted.peak_bytes - search.memory) / activation_bytes if activation_bytes else share
            again = activations.recompute(max(0.0, share) * activations.whole, seconds)
            if again in tried or search.late:
                return
            tried.add(again)
            search.progress(f"{plan.name} with {len(again)} operators recomputed")
            planner = search.planner(plan.accumulate, Variant(plan.sequence_chunks, again))
            try:
                candidate = search.candidate(planner.inside(plan.pipe), plan.inner)
                candidate = PipelineCandidate(candidate, plan.pipe, search.cluster) if plan.stages else candidate
            except ValueError:  # a cut would need activations that are not kept
                return
            search.candidates.append(candidate)
            smaller = search.fit(candidate, slow=True)
            if smaller is None or search.fits(smaller):  # None: the budget is spent
                return

    def _activations(self, count: int, sequence_chunks: int) -> tuple[Activations, Callable[[Call], float]]:
        """The activations of a step's forward pass, and a function that gives the seconds of its calls."""
        step = self.of.planner(count, Variant(sequence_chunks)).step
        self.of.work.simulate(sum(node.meta["phase"] == FORWARD for node in step.calls))
        return Activations(step), self.of.judge.forward_seconds(step, self.of.cluster)
