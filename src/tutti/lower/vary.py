"""The variants of a step's graph that plans are made for."""

from __future__ import annotations

from tutti.graph.step_graph import StepGraph
from tutti.lower.recompute import recompute
from tutti.lower.unroll import copy, unroll
from tutti.plan.variant import Variant


def vary(step: StepGraph, variant: Variant) -> StepGraph:
    """Raises ValueError where the sequence, or the batch, cannot be cut so."""
    return recompute(copy(unroll(step, variant.slices), variant.copies), variant.again)
