"""Copies of the batch: where the best plan has devices that wait for communication, one copy computes while the other
communicates.

The batch, or the microbatch, is cut in two (`lower.unroll`); layouts, and the cut of a pipeline, are chosen anew for
that step, and the judge says whether the order that is found for it (`run.overlap`) ends earlier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tutti.plan.piped import Piped
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
        """Try the best plan that fits in copies."""
        search = self.of
        if not search.cluster.device.computes_on or search.fastest is None or search.late:
            return
        best = search.best_of_all
        made = best.predicted
        if best.slices > 1 or best.copies > 1 or best.again or made.communication_seconds < WAITING * made.step_seconds:
            return
        search.progress(f"{best.name} in {COPIES} copies of the batch")
        try:
            planner = search.planner(best.accumulate, Variant(copies=COPIES))
            candidate = search.candidate(planner.inside(best.pipe), best.inner)
            candidate = Piped(candidate, best.pipe, search.cluster) if best.stages else candidate
            search.fit(candidate, slow=True)
        except (ValueError, RuntimeError) as error:  # a batch that does not divide, or layouts that copies cannot take
            search.progress(f"{best.name} cannot be had in copies: {error}")
            return
        search.candidates.append(candidate)
