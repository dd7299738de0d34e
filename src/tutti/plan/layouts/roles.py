"""Roles of mesh axes: which choices an axis may make for an operator.

`Free` allows all legal choices; `Roles` allows those of the textbook's `dp`, `cp`, `ep` and `tp`. The search asks which
of the legal choices of an operator along an axis are allowed. Pinned and stored inputs have only their given layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tutti.ir.op_info import FLOPS
from tutti.ir.step_graph import UPDATE
from tutti.ops.attention.attention import is_causal
from tutti.plan.layouts.choice import Choice, legal, output_placement, waste
from tutti.plan.layouts.experts import ROUTED, Experts
from tutti.plan.layouts.follow import follow
from tutti.plan.layouts.layout import Layout, Mesh, Partial, Split
from tutti.plan.layouts.options import Required
from tutti.plan.layouts.problem import Operator, Problem
from tutti.plan.textbook import Textbook


class UndividedBatch(ValueError):
    """A batch does not divide over the devices that should split it."""


STATELESS = ("param", "buffer", "batch", "common", "lr", "step", "count", "seed", "constant", "grad")


class Free:
    """Allows all choices, except for inputs with given layouts.

    in_order: see `plan.layouts.options`.
    """

    in_order: frozenset[str] = frozenset()

    def __init__(self, problem: Problem, mesh: Mesh, pins: Required, stored: Mapping[str, Layout]):
        self.problem, self.mesh = problem, mesh
        fixed = {label: {axis: layout[axis] for axis in mesh} for label, layout in stored.items()}
        self.required: Required = {**pins, **fixed}

    def __call__(self, o: Operator, axis: str, choices: Sequence[Choice | None]) -> Sequence[Choice | None]:
        placement = self.required.get(o.label, {}).get(axis)
        if placement is None:
            return self.free(o, axis, choices)
        if not isinstance(placement, Split):
            return [None]
        choice = Choice(o.rule.outputs[0][placement.dim][0], placement.outer, unit=placement.unit)
        if not legal(o.rule, {axis: choice}, self.mesh):
            raise ValueError(f"{o.label} of shape {o.outputs[0].shape} cannot be split at dim {placement.dim} over "
                             f"{self.mesh[axis]} devices of axis {axis!r}")  # fmt: skip
        return [choice]

    def free(self, o: Operator, axis: str, choices: Sequence[Choice | None]) -> Sequence[Choice | None]:
        return worthwhile(o, choices, self.mesh[axis])


def worthwhile(o: Operator, choices: Sequence[Choice | None], k: int) -> list[Choice | None]:
    """The choices whose largest of k parts is at most a quarter larger than the mean."""
    return [c for c in choices if c is None or waste(o.rule, c, k) <= 0.25]


class Roles(Free):
    """Allows the textbook's choices.

    `dp` splits the batch and values computed from it, `cp` the sequence. `tp` splits matrices and computes with the
    parts. `ep` splits experts, and everything else along the batch. The ZeRO stage determines the tensors that are
    split over `dp`, `cp` and `ep`. See `plan.textbook`.

    microbatches: number of microbatches of an update, for error messages; the problem is that of one microbatch.
    stripes: whether `cp` splits sequences into stripes (`plan.layouts.problem.striped`).
    """

    in_order = frozenset({"dp", "fsdp", "cp", "ep"})  # all split the batch: any order is as good, if it is the same

    def __init__(self, problem: Problem, book: Textbook, pins, stored, microbatches: int = 1, stripes: bool = False):
        super().__init__(problem, book.mesh, pins, stored)
        self.microbatches = microbatches
        self.zero, self.folded, self.hybrid = book.zero, book.folded, book.shard > 0
        self.from_batch = problem.reached_from("batch")
        self.experts = Experts(problem)
        self.sequences = sequences(problem)
        lengths = {label: problem.operators[label].outputs[0].shape[1] for label in self.sequences}
        self.stripes = stripes
        uneven = {label: int(n % book.cp > 0) for label, n in lengths.items()}
        contiguous = {(label, 0): Split(1, unit=uneven[label]) for label in lengths}
        striped = {(label, 0): Split(1, n // book.cp, unit=uneven[label]) for label, n in lengths.items()}
        self.along = follow(problem, striped if stripes else contiguous, book.cp) if book.cp > 1 else {}
        # cp and tp split the same dim: a part of cp that does not divide stays whole, as a sequence does without cp.
        whole = {label for label, n in lengths.items() if n % book.cp == 0 and n // book.cp % book.tp}
        divided = {key: split for key, split in contiguous.items() if key[0] not in whole}
        self.stream = _stream(problem, follow(problem, divided, book.tp)) if book.sp else {}
        if (book.ep > 1 or book.folded) and not self.experts.factors:
            what = "'experts'" if book.folded else "axis 'ep'"
            raise ValueError(f"plan {str(book)!r}: the model has no experts that {what} could split; write dp")

    def free(self, o: Operator, axis: str, choices: Sequence[Choice | None]) -> Sequence[Choice | None]:
        if axis in ("dp", "fsdp"):
            return self._data(o, choices, axis)
        return {"cp": self._context, "ep": self._expert, "tp": self._tensor}[axis](o, choices)

    def _data(self, o: Operator, choices: Sequence[Choice | None], axis: str = "dp") -> Sequence[Choice | None]:
        zero = 0 if axis == "dp" and self.hybrid else self.zero
        if o.kind == "batch" and o.outputs[0].shape:
            first = _along(o, 0, choices)
            if not first:
                size, k, kind = o.outputs[0].shape[0], self.mesh[axis], "expert" if axis == "ep" else "data"
                many = self.microbatches
                what = f"a batch of {size}" if many == 1 else f"each of {many} microbatches has {size} rows, and that"
                raise UndividedBatch(
                    f"{o.label}: {what} does not divide over {k} {kind}-parallel devices, which need a row "
                    "each in every microbatch: give an example with more rows (later batches may be smaller), fewer "
                    "microbatches, or a plan with fewer such devices"
                )
            return first
        if o.kind == "cache":  # has the layout of values computed from the batch
            return choices
        if o.kind == "param":
            return _split(choices) if zero == 3 else [None]
        if o.is_input:
            return _split(choices) if zero and o.kind not in STATELESS else [None]
        if o.phase == UPDATE:
            return choices if zero else [None]
        if o.label in self.problem.weights:  # a view has the weight's layout, so it is gathered for each use
            return _split(choices) if zero == 3 else [None]
        used = self.problem.weight_factors(o)  # the weight is not split along dp
        allowed = [c for c in choices if c is None or not used & dict(c.splits).keys()]
        return _split(allowed) if o.label in self.from_batch and any(c and c.factor for c in allowed) else allowed

    def _context(self, o: Operator, choices: Sequence[Choice | None]) -> Sequence[Choice | None]:
        """Splits sequences of the batch at dim 1; operators on them follow."""
        if o.kind == "batch":
            if o.label not in self.sequences:
                return [None]
            length = o.outputs[0].shape[1]
            second = _along(o, 1, choices, length // self.mesh["cp"] if self.stripes else 1)
            if not second:
                length = f"dim 1, a sequence of {o.outputs[0].shape[1]},"
                raise ValueError(f"{o.label}: {length} does not divide into {self.mesh['cp']} parts")
            return second
        if o.is_input or o.phase == UPDATE or (self.zero == 3 and o.label in self.problem.weights):
            return self._data(o, choices, "cp")
        choices = [c for c in choices if not (c and c.also)]
        if o.label in self.along and self.along[o.label] in choices:
            return [self.along[o.label]]
        if o.label in self.problem.gradients:  # reduced last, as are those of microbatches
            outputs = [index for maker, index in self.problem.handed_on if maker == o.label]
            return [c for c in choices if c and all(self._is_sum(o, c, i) for i in outputs)] or choices
        return choices

    def _is_sum(self, o: Operator, choice: Choice, output: int) -> bool:
        return isinstance(output_placement(o.rule, choice, output), Partial)

    def _expert(self, o: Operator, choices: Sequence[Choice | None]) -> Sequence[Choice | None]:
        """Like `dp`, but experts, their gradients and their state are split, and used where they are stored."""
        own = self._whole_experts(o, choices, "ep")
        return self._data(o, choices, "ep") if own is None else own

    def _whole_experts(
        self, o: Operator, choices: Sequence[Choice | None], axis: str
    ) -> Sequence[Choice | None] | None:
        """Choices of an axis that splits experts, and not an expert; None for operators that do not use experts."""
        if o.is_input and o.outputs[0].shape in self.experts.shapes:
            counted = [c for c in _along(o, 0, choices) if not c.unit]
            if not counted:
                size, k = o.outputs[0].shape[0], self.mesh[axis]
                raise ValueError(f"{o.label}: {size} experts do not divide over {k} expert-parallel devices")
            return counted
        if o.label in self.experts.matrices or self.experts.updates(o):
            return choices
        if o.label in self.experts.factors:
            counted = self.experts.factors[o.label]
            travel = [c for c in choices if c and any(factor == counted for factor, _ in c.also)]
            return travel or [c for c in choices if c and c.factor == counted]
        if o.target in ROUTED:  # computes the slots of all experts for a rank's groups
            return [c for c in choices if c and c.factor == "g"] or choices
        return None

    def _tensor(self, o: Operator, choices: Sequence[Choice | None]) -> Sequence[Choice | None]:
        if self.folded and (own := self._whole_experts(o, choices, "tp")) is not None:
            return own
        if choice := self.stream.get(o.label):
            if choice not in choices:
                raise ValueError(f"{o.label}: its sequence does not divide into {self.mesh['tp']} parts, as 'sp' asks")
            return [choice]
        if o.is_input:
            if o.kind in ("batch", "common", "lr", "step", "count", "seed", "constant", "buffer"):
                return [None]
            return _split(choices) if o.kind == "param" and len(o.outputs[0].shape) > 1 else choices
        if o.label in self.problem.weight_operand and o.phase != UPDATE:
            dims = o.rule.inputs[self.problem.weight_operand[o.label]]
            inside = self.problem.weight_factors(o) - {self.experts.factors.get(o.label)}  # dims of each expert
            used = [c for c in choices if c and c.factor in inside]
            if len(dims) > 1 and used:
                return used
        if o.label in self.problem.gradients and len(o.outputs[0].shape) > 1:  # is split like the matrix
            splits = [c for c in choices if c and c.factor and isinstance(output_placement(o.rule, c, 0), Split)]
            return splits or choices
        return _split(choices) if o.target in FLOPS else choices


def sequences(problem: Problem) -> list[str]:
    """Inputs of the batch whose dim 1 is as long as that of the first input with more than one dim."""
    shapes = {o.label: o.outputs[0].shape for o in problem.operators.values() if o.kind == "batch"}
    lengths = [shape[1] for shape in shapes.values() if len(shape) > 1 and shape[1] > 1]
    return [label for label, shape in shapes.items() if len(shape) > 1 and shape[1] in lengths[:1]]


def balances(problem: Problem, parts: int) -> bool:
    """Whether a sequence should be split into stripes: attention is causal, and all its sequences divide."""
    lengths = [problem.operators[label].outputs[0].shape[1] for label in sequences(problem)]
    causal = any(o.node is not None and is_causal(o.node) for o in problem.operators.values())
    return causal and bool(lengths) and all(length % parts == 0 and length > parts for length in lengths)


def _along(o: Operator, dim: int, choices: Sequence[Choice | None], outer: int = 1) -> list[Choice]:
    """The choice that splits a dim of an input in contiguous parts (with `outer`, inside so many blocks), by single
    elements if it does not divide."""
    factor = o.rule.outputs[0][dim][0]
    return [c for c in choices if c and c.factor == factor and c.outer == outer and c.unit <= 1][:1]


def _stream(problem: Problem, along: Mapping[str, Choice]) -> dict[str, Choice]:
    """The choices of norms over (batch, sequence, hidden), and of elementwise operators of that shape.

    along: choices that split the sequence.
    """
    norms = {label: o.outputs[0].shape for label, o in problem.operators.items() if "norm" in str(o.target)}
    shapes = {shape for label, shape in norms.items() if label in along and len(shape) == 3}

    def between(o: Operator) -> bool:
        return "norm" in str(o.target) or torch.Tag.pointwise in getattr(o.target, "tags", ())

    candidates = ((label, problem.operators[label]) for label in along)
    return {label: along[label] for label, o in candidates if o.outputs[0].shape in shapes and between(o)}


def _split(choices: Sequence[Choice | None]) -> Sequence[Choice | None]:
    """The choices that split; all choices if none does."""
    return [c for c in choices if c] or choices
