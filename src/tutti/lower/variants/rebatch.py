"""A captured step for fewer rows of the batch, without capturing it again.

The split of the batch's rows is followed through the graph (`plan.layouts.follow`) and back to operators that make
tensors of as many rows. Each operator that has the rows gets the shapes, and the arguments that say shapes, of its
share. Python numbers that depend on the rows otherwise (the divisor of a mean) stay as they are, so the graph is for
planning: it costs what a captured step costs, but does not compute its numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache

import torch
from torch import fx

from tutti import compat
from tutti.ir.op_info import ARGUMENTS
from tutti.ir.spec import Spec
from tutti.ir.step_graph import Call, StepGraph, copy_graph
from tutti.ops.costs import annotate_costs
from tutti.plan.layouts.choice import Choice, candidates, input_placement, layouts, output_placement
from tutti.plan.layouts.follow import follow
from tutti.plan.layouts.layout import Placement, R, Split
from tutti.plan.layouts.problem import Problem, problem_of

ROWS = "rows"  # the axis that divides the batch


class Steps:
    """The step of a microbatch, for any number of microbatches.

    capture: captures the step of one of so many microbatches.
    """

    def __init__(self, capture: Callable[[int], StepGraph]):
        self.captured = cache(capture)
        self.planned = cache(self._planned)
        self.captured_counts: list[int] = []

    def _planned(self, count: int) -> StepGraph:
        """Return the step to plan with: derived from a captured step if its rows can be followed, else captured."""
        for divisor in self.captured_counts:
            if count % divisor == 0:
                with suppress(ValueError):  # the rows are not followed through all operators
                    return rebatched(self.captured(divisor), count // divisor)
        self.captured_counts.append(count)
        return self.captured(count)


def rebatched(step: StepGraph, parts: int) -> StepGraph:
    """Derive the step for 1 / `parts` of the rows.

    Raises ValueError if the rows do not divide, or cannot be followed through all operators that depend on them.
    """
    problem, mesh = problem_of(step), {ROWS: parts}
    choices = _of_rows(problem, parts)
    copy, mapping = copy_graph(step.graph)
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for label, o in problem.operators.items():
        chosen = {ROWS: choices[label]} if label in choices else {}
        shapes[label] = [at.local_shape(s.shape, mesh)
                         for at, s in zip(layouts(o.rule, chosen)[1], o.outputs, strict=True)]  # fmt: skip
    seen: set[str] = set()
    for node in copy.nodes:
        label = node.meta["label"]
        if label not in choices or node.target is operator.getitem:
            continue
        local, val = shapes[label], node.meta["val"]
        new_specs = [spec and Spec(shape, spec.dtype)
                     for shape, spec in zip(local, (val,) if isinstance(val, Spec) else val, strict=True)]  # fmt: skip
        node.meta["val"] = new_specs[0] if isinstance(val, Spec) else tuple(new_specs)
        for reader in node.users:
            if reader.target is operator.getitem:
                reader.meta["val"] = new_specs[reader.args[1]]
        if node.target in ARGUMENTS:
            node.args = tuple(map(_open, node.args, ARGUMENTS[node.target](node.args, local)))
        elif isinstance(val, Spec):  # a maker of numbers, whose shape is an argument
            node.args = tuple(list(local[0]) if x == list(val.shape) else x for x in node.args)
        if node.op == "call_function" and label not in seen:
            seen.add(label)
            _check(node)
    outputs = {name: mapping[node] for name, node in step.outputs.items()}
    copy.output(tuple(outputs.values()))
    inputs = {name: mapping[node] for name, node in step.inputs.items()}
    result = StepGraph(copy, inputs, outputs, step.constants, step.device, step.matches, step.guards, step.checks,
                       step.counts)  # fmt: skip
    annotate_costs(result)
    return result


def _of_rows(problem: Problem, parts: int) -> dict[str, Choice]:
    """Return the choices that split the rows of the batch, for each operator and input that has them."""
    batch = {label: o for label, o in problem.operators.items() if o.kind == "batch" and o.outputs[0].shape}
    if any(o.outputs[0].shape[0] % parts for o in batch.values()):
        raise ValueError(f"the rows of the batch do not divide into {parts} parts")
    choices = {label: Choice(o.rule.outputs[0][0][0]) for label, o in batch.items()}
    choices |= follow(problem, {(label, 0): Split(0) for label in batch}, parts)
    changed = True
    while changed:  # back from a reader to the makers of its other operands, such as a mask or positions
        changed = False
        for edge in problem.edges:
            needed, (label, index) = _read(problem, edge.reader, edge.operand, choices), edge.tensor
            if not isinstance(needed, Split) or label in choices or problem.operators[label].is_input:
                continue
            rule = problem.operators[label].rule
            for choice in candidates(rule, problem.cuts[label], parts):
                if output_placement(rule, choice, index) == needed:
                    choices[label], changed = choice, True
                    break
    for edge in problem.edges:
        label, index = edge.tensor
        placement = output_placement(problem.operators[label].rule, choices[label], index) if label in choices else R
        needed = _read(problem, edge.reader, edge.operand, choices)
        is_split = isinstance(placement, Split)
        if is_split != isinstance(needed, Split) or (is_split and placement != needed):
            raise ValueError(f"the rows of the batch are not followed from {label} to {edge.reader}")
    return choices


def _read(problem: Problem, reader: str, operand: int, choices: Mapping[str, Choice]) -> Placement:
    """Return the placement in which a reader reads an operand."""
    if reader not in choices or operand < 0:
        return R
    return input_placement(problem.operators[reader].rule, choices[reader], operand)


def _open(before, now):
    """An argument with the dims that are left open (-1) as before."""
    if isinstance(before, (list, tuple)) and isinstance(now, (list, tuple)) and len(before) == len(now):
        return [b if b == -1 else n for b, n in zip(before, now, strict=True)]
    return now


def _check(node: Call) -> None:
    """Raise ValueError if the operator returns other shapes than those of its share."""
    with compat.fake_mode():
        fakes = {x: _fake(x.meta["val"]) for x in node.all_input_nodes}
        args, kwargs = fx.map_arg((node.args, node.kwargs), fakes.__getitem__)  # pyright: ignore
        try:
            spec = Spec.of(node.target(*args, **kwargs))
        except (RuntimeError, ValueError, IndexError, AssertionError) as error:
            raise ValueError(f"{node.meta['label']} cannot have fewer rows: {error}") from error
    if spec != node.meta["val"]:
        raise ValueError(f"{node.meta['label']} has {spec} with fewer rows, not {node.meta['val']}")


def _fake(val: Spec | tuple) -> torch.Tensor | tuple:
    return torch.empty(val.shape, dtype=val.dtype) if isinstance(val, Spec) else tuple(map(_fake, val))
