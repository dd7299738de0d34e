"""Copies: where the best plan has devices that wait for communication, one part computes while another communicates.

The batch, or the microbatch, is cut in two (`lower.unroll`); layouts, and the cut of a pipeline, are chosen anew for
that step. Or the regions between communications are (`lower.regions`), of the best plan as it is. The judge says
whether the order that is found for either (`analysis.overlap`) ends earlier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tutti.plan.pipeline_candidate import PipelineCandidate
from tutti.plan.plan import Plan
from tutti.plan.variant import Variant

if TYPE_CHECKING:
    from tutti.plan.search import Search

WAITING = 0.03  # of a step: what waits less has little to win
COPIES = 2


class Copies:
    """Those of a search."""

    def __init__(self, search: Search):
        self.of = search

    def search(self) -> None:
        """Try the best plan that fits in copies, and with its regions in parts."""
        search = self.of
        if not search.cluster.device.computes_on or search.fastest is None:
            return
        best = search.best_of_all
        made = best.predicted
        if (
            best.sequence_chunks > 1
            or best.batch_splits > 1
            or made.communication_seconds < WAITING * made.step_seconds
        ):
            return
        if not best.stages and not best.tiers and search.affords(best.accumulate, best.variant):
            self.overlap_chunks(best)
        if not best.recompute and search.affords(best.accumulate, Variant(batch_splits=COPIES)):
            self.batch_splits(best)

    def overlap_chunks(self, best: Plan) -> None:
        try:
            self.of.judgement(best.replace(name=f"{best.name}xoverlap{COPIES}", overlap_chunks=COPIES, prediction=None))
        except ValueError as error:  # there are none
            self.of.progress(f"{best.name}: {error}")

    def batch_splits(self, best: Plan) -> None:
        search = self.of
        search.progress(f"{best.name} in {COPIES} copies of the batch")
        try:
            planner = search.planner(best.accumulate, Variant(batch_splits=COPIES))
            candidate = search.candidate(planner.inside(best.pipe), best.inner)
            candidate = PipelineCandidate(candidate, best.pipe, search.cluster) if best.stages else candidate
            search.fit(candidate, slow=True)
        except ValueError as error:  # a batch that does not divide
            search.progress(f"{best.name} cannot be had in copies: {error}")
            return
        search.candidates.append(candidate)
