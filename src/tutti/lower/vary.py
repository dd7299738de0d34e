"""The variants of a step's graph that plans are made for."""

from __future__ import annotations

from tutti.graph.step_graph import StepGraph
from tutti.lower.recompute import recompute
from tutti.lower.unroll import unroll
from tutti.plan.variant import Variant


def vary(step: StepGraph, variant: Variant) -> StepGraph:
    """Raises ValueError where the sequence cannot be cut so."""
    return recompute(unroll(step, variant.slices), variant.again)
