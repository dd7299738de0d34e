"""Copies: if devices of the best plan wait for communication, one part computes while another communicates.

The parts are two copies of the batch or microbatch (`lower.variants.unroll`), for which layouts and the cut of a
pipeline are searched again, or parts of the regions between communications (`lower.overlap.regions`), in the best plan
as it is. `analysis.overlap` orders the parts, and the judge decides whether the result is faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tutti.plan.pipeline.candidate import PipelineCandidate
from tutti.plan.plan import Plan
from tutti.plan.variant import Variant

if TYPE_CHECKING:
    from tutti.plan.search.search import Search

WAITING = 0.03  # minimum share of a step spent waiting for communication
COPIES = 2


class Copies:
    """Searches plans that overlap computation and communication, for a `Search`."""

    def __init__(self, search: Search):
        self.of = search

    def search(self) -> None:
        """Try the best plan that fits with copies of the batch, and with its regions in parts."""
        search = self.of
        if not search.cluster.device.computes_on or search.fastest is None:
            return
        best = search.best_of_all
        prediction = best.predicted
        if (
            best.sequence_chunks > 1
            or best.batch_splits > 1
            or prediction.communication_seconds < WAITING * prediction.step_seconds
        ):
            return
        if not best.stages and not best.tiers and search.affords(best.accumulate, best.variant):
            self.overlap_chunks(best)
        if not best.recompute and search.affords(best.accumulate, Variant(batch_splits=COPIES)):
            self.batch_splits(best)

    def overlap_chunks(self, best: Plan) -> None:
        try:
            self.of.judgement(best.replace(name=f"{best.name}xoverlap{COPIES}", overlap_chunks=COPIES, prediction=None))
        except ValueError as error:  # the step has no such regions
            self.of.progress(f"{best.name}: {error}")

    def batch_splits(self, best: Plan) -> None:
        search = self.of
        search.progress(f"{best.name} in {COPIES} copies of the batch")
        try:
            planner = search.planner(best.accumulate, Variant(batch_splits=COPIES))
            candidate = search.candidate(planner.inside(best.pipe), best.inner)
            candidate = PipelineCandidate(candidate, best.pipe, search.cluster) if best.stages else candidate
            search.fit(candidate, slow=True)
        except ValueError as error:  # the batch does not divide
            search.progress(f"{best.name} cannot be split into copies: {error}")
            return
        search.candidates.append(candidate)
