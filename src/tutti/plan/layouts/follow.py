"""Propagates a split through a step, so that every operator uses split tensors without moving them.

Starting from given tensors, each operator takes the choice of the axis that matches the most operands. Among equals,
it takes the one that leaves the most outputs split. An operator that matches no operand gets none and ends the
propagation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from tutti.plan.layouts.choice import Choice, candidates, input_placement, output_placement
from tutti.plan.layouts.layout import Split
from tutti.plan.layouts.problem import Problem, Tensor


def follow(problem: Problem, tensor_splits: Mapping[Tensor, Split], size: int) -> dict[str, Choice]:
    """The choices by label, for an axis of this size and splits of some tensors. None splits two factors at once
    (`t&e`): experts would follow tokens."""
    splits, choices = dict(tensor_splits), {}
    read: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
    for edge in problem.edges:
        if edge.operand >= 0:
            read[edge.reader].append((edge.operand, edge.tensor))
    for _ in range(2):  # operators that read the output of a folded layer need a second pass
        for label, o in problem.operators.items():
            read_splits = [(i, splits[tensor]) for i, tensor in read[label] if tensor in splits]
            if not read_splits or label in choices:
                continue
            best, most = None, (0, 0)
            for choice in candidates(o.rule, problem.cuts[label], size):
                if choice.also:
                    continue
                outputs = [output_placement(o.rule, choice, i) for i in range(len(o.rule.outputs))]
                matched = sum(input_placement(o.rule, choice, i) == split for i, split in read_splits)
                score = matched, sum(isinstance(p, Split) for p in outputs)
                if matched and score > most:
                    best, most = choice, score
            if best:
                choices[label] = best
                for i in range(len(o.rule.outputs)):
                    if isinstance(placement := output_placement(o.rule, best, i), Split):
                        splits[label, i] = placement
    return choices
