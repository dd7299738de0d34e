"""Following a split through a step: the choices in which every operator takes what is split as it lies.

From some tensors on, operator by operator: of the choices of one axis that which matches the most operands, of those
that which leaves the most outputs split. An operator that matches none is left open, and ends the trail.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from tutti.plan.choice import Choice, candidates, input_placement, output_placement
from tutti.plan.layout import Split
from tutti.plan.problem import Problem, Tensor


def follow(problem: Problem, given: Mapping[Tensor, Split], size: int) -> dict[str, Choice]:
    """By label, for an axis of this size and tensors that lie so."""
    known, found = dict(given), {}
    read: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
    for edge in problem.edges:
        if edge.operand >= 0:
            read[edge.reader].append((edge.operand, edge.tensor))
    for _ in range(2):  # what the first of equal layers makes is read by them again
        for label, o in problem.operators.items():
            held = [(i, known[tensor]) for i, tensor in read[label] if tensor in known]
            if not held or label in found:
                continue
            best, most = None, (0, 0)
            for choice in candidates(o.rule, problem.cuts[label], size):
                outputs = [output_placement(o.rule, choice, i) for i in range(len(o.rule.outputs))]
                matched = sum(input_placement(o.rule, choice, i) == split for i, split in held)
                score = matched, sum(isinstance(p, Split) for p in outputs)
                if matched and score > most:
                    best, most = choice, score
            if best:
                found[label] = best
                for i in range(len(o.rule.outputs)):
                    if isinstance(placement := output_placement(o.rule, best, i), Split):
                        known[label, i] = placement
    return found
