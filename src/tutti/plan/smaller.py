"""Plans made smaller by computing again: those that would be faster than the best that fits, if they fitted.

Of what a plan keeps for its backward pass (`plan.recompute`) so much is computed again as it is too large, and layouts,
and the cut of a pipeline, are chosen anew for that step; more, while it does not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from tutti.ir.step_graph import Call
from tutti.plan.pipeline_candidate import PipelineCandidate
from tutti.plan.plan import Plan
from tutti.plan.recompute import Activations
from tutti.plan.variant import Variant

if TYPE_CHECKING:
    from tutti.plan.search import Search

MOST = 3  # plans that are made smaller
TRIES = 4  # for each
HELD = "activations"  # kind of memory


class Smaller:
    """Those of a search."""

    def __init__(self, search: Search):
        self.of = search
        self.activations = cache(self._activations)

    def search(self) -> None:
        """Try the fastest that do not fit, and the smallest, while there is time."""
        search = self.of
        large = [plan for plan in search.plans if not search.fits(plan) and not plan.recompute]
        alike: dict[tuple, Plan] = {}  # of each mesh, number of microbatches and pipeline the fastest
        for plan in sorted(large, key=lambda p: p.predicted.step_seconds):
            alike.setdefault((*plan.mesh.items(), plan.accumulate, str(plan.pipe)), plan)
        fastest = list(alike.values())
        smallest = sorted(fastest[MOST:], key=lambda p: p.predicted.peak_bytes)[:1]
        for plan in [*fastest[:MOST], *smallest]:
            if search.late or search.slower(plan.predicted.step_seconds / search.fused):
                return
            self.shrink(plan)

    def shrink(self, plan: Plan) -> None:
        """Compute more of it again until it fits, or nothing is left to be."""
        search, made, share = self.of, plan, 1.0
        known: set[tuple[str, ...]] = {()}
        activations, seconds = self.activations(plan.accumulate, plan.sequence_chunks)
        for _ in range(TRIES):
            held = plan.predicted.bytes_by_kind.get(HELD, 0)
            share -= (made.predicted.peak_bytes - search.memory) / held if held else share
            again = activations.recompute(max(0.0, share) * activations.whole, seconds)
            if again in known or search.late:
                return
            known.add(again)
            search.progress(f"{plan.name} with {len(again)} operators computed again")
            planner = search.planner(plan.accumulate, Variant(plan.sequence_chunks, again))
            try:
                candidate = search.candidate(planner.inside(plan.pipe), plan.inner)
                candidate = PipelineCandidate(candidate, plan.pipe, search.cluster) if plan.stages else candidate
            except ValueError:  # it cannot be cut where its insides are not kept
                return
            search.candidates.append(candidate)
            made = search.fit(candidate, slow=True)
            if made is None or search.fits(made):  # or there is no time left
                return

    def _activations(self, count: int, sequence_chunks: int) -> tuple[Activations, Callable[[Call], float]]:
        """What the forward pass of a step makes, and what its calls take."""
        step = self.of.planner(count, Variant(sequence_chunks)).step
        return Activations(step), self.of.judge.forward_seconds(step, self.of.cluster)
