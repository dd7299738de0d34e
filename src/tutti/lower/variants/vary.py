"""The variants of a step's graph that the planner considers."""

from __future__ import annotations

from tutti.ir.step_graph import StepGraph
from tutti.lower.memory.recompute import checkpointed, recompute
from tutti.lower.variants.low_precision import in_low_precision
from tutti.lower.variants.unroll import copy, unroll
from tutti.plan.variant import Variant


def vary(step: StepGraph, variant: Variant) -> StepGraph:
    """Transform a step into a variant, with recomputation of the model's `torch.utils.checkpoint` regions.

    Raises ValueError if the sequence or the batch cannot be cut like this, or if no product can be in low precision.
    """
    varied = copy(unroll(step, variant.sequence_chunks), variant.batch_splits)
    varied = in_low_precision(varied, variant.matmul_dtype) if variant.matmul_dtype else varied
    varied = recompute(varied, (*variant.recompute, *checkpointed(varied)))
    varied.guards, varied.checks, varied.counts = step.guards, step.checks, step.counts
    return varied
