"""Options: the combinations of choices of all axes for an operator, and the layouts of its operands and outputs.

An option has a `Choice` for each axis that splits the operator. Axes that split the same factor are nested in every
order. Options with equal layouts are merged into the first of them. Operators with the same rule and sizes share their
options. Placements are encoded as integers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product

import numpy as np

from tutti.ops.rule import Rule
from tutti.plan.layouts.choice import (
    Choice,
    Choices,
    Position,
    candidates,
    input_placement,
    legal,
    nest,
    output_placement,
)
from tutti.plan.layouts.layout import Mesh, Placement, R
from tutti.plan.layouts.problem import Operator

CODES: dict[Placement, int] = {R: 0}  # placement -> code, for all placements so far
PLACEMENTS: list[Placement] = [R]

Required = Mapping[str, Mapping[str, Placement]]
Allowed = Callable[[Operator, str, Sequence[Choice | None]], Sequence[Choice | None]]


def code(placement: Placement) -> int:
    if placement not in CODES:
        CODES[placement] = len(PLACEMENTS)
        PLACEMENTS.append(placement)
    return CODES[placement]


@dataclass(frozen=True)
class Options:
    """choices: one per option. inputs, outputs: for each tensor an array (options, axes) of codes of placements."""

    choices: list[dict[str, Choice]]
    inputs: tuple[np.ndarray, ...]
    outputs: tuple[np.ndarray, ...]

    def __len__(self) -> int:
        return len(self.choices)


class OptionTable:
    """Options of operators on one mesh.

    allowed: for an operator, an axis and all its legal choices (None: compute the full operator), returns the choices
        to consider.
    required: layouts of inputs, by label and axis.
    in_order: axes that nest only as in the mesh where they split the same factor of a computed value.

    Raises ValueError if an input cannot have its required layout.
    """

    def __init__(
        self, mesh: Mesh, cuts: Mapping[str, Mapping[str, set[Position]]], allowed: Allowed | None = None,
        required: Required | None = None, in_order: Collection[str] = (),
    ):  # fmt: skip
        self.mesh, self.cuts, self.allowed, self.required = mesh, cuts, allowed, required or {}
        self.in_order = in_order
        self.cache: dict[tuple, Options] = {}

    def __getitem__(self, o: Operator) -> Options:
        per_axis = []
        for axis, k in self.mesh.items():
            choices = [None, *candidates(o.rule, self.cuts[o.label], k)] if k > 1 else [None]
            choices = [c for c in choices if not (c and c.linear and o.is_input)]
            per_axis.append(tuple(self.allowed(o, axis, choices) if self.allowed and k > 1 else choices))
        fixed = () if o.is_input else self.in_order
        key = (o.rule.notation, o.rule.inputs, tuple(sorted(o.rule.sizes.items())), tuple(per_axis), bool(fixed))
        if key not in self.cache:
            options = self._make(o.rule, per_axis, fixed)  # choices allowed for each axis may not be legal together
            self.cache[key] = (
                options if len(options) else self._make(o.rule, [(*legal, None) for legal in per_axis], fixed)
            )
        return self._as_required(self.cache[key], o)

    def _as_required(self, options: Options, o: Operator) -> Options:
        """The options in which an input has its required layout. Nested axes may have changed it."""
        if o.label not in self.required:
            return options
        axes = list(self.mesh)
        wanted = [(axes.index(axis), code(p)) for axis, p in self.required[o.label].items() if self.mesh[axis] > 1]
        fitting = [i for i, codes in enumerate(options.outputs[0]) if all(codes[a] == c for a, c in wanted)]
        if not fitting:
            shown = ", ".join(f"{axis}: {placement}" for axis, placement in self.required[o.label].items())
            raise ValueError(
                f"{o.label} of shape {o.outputs[0].shape} cannot be laid out as {shown} on a mesh {dict(self.mesh)}"
            )
        return Options([options.choices[i] for i in fitting], (), (options.outputs[0][fitting],))

    def _make(self, rule: Rule, per_axis: list[tuple[Choice | None, ...]], in_order: Collection[str]) -> Options:
        unique: dict[tuple, dict[str, Choice]] = {}
        for taken in product(*per_axis):
            for choices in self._nested(dict(zip(self.mesh, taken, strict=True)), in_order):
                if legal(rule, choices, self.mesh):
                    unique.setdefault(tuple(_codes(rule, choices, self.mesh)), choices)
        axes, ins = len(self.mesh), len(rule.inputs)
        codes = np.array(list(unique), dtype=np.int32).reshape(len(unique), axes * (ins + len(rule.outputs)))
        parts = [codes[:, i * axes : (i + 1) * axes] for i in range(ins + len(rule.outputs))]
        return Options(list(unique.values()), tuple(parts[:ins]), tuple(parts[ins:]))

    def _nested(self, taken: dict[str, Choice | None], in_order: Collection[str]) -> list[dict[str, Choice]]:
        """These choices, with axes that split one factor at one position nested in every order. in_order: axes that
        keep that of the mesh among themselves."""
        chosen = {axis: choice for axis, choice in taken.items() if choice}
        places = Counter(place for c in chosen.values() for place in c.splits)
        together = [axis for axis, c in chosen.items() if any(places[place] > 1 for place in c.splits)]
        nestings = []
        fixed = [axis for axis in together if axis in in_order]
        for order in permutations(together):
            if [axis for axis in order if axis in in_order] != fixed:
                continue
            choices: dict[str, Choice] = {}
            for axis in (*(axis for axis in chosen if axis not in together), *order):
                choices[axis] = nest(chosen[axis], choices, self.mesh)
            nestings.append({axis: choices[axis] for axis in chosen})
        return nestings


def _codes(rule: Rule, choices: Choices, mesh: Mesh) -> list[int]:
    codes = []
    for placement, operands in ((input_placement, rule.inputs), (output_placement, rule.outputs)):
        for i in range(len(operands)):
            codes += [code(placement(rule, choices[axis], i)) if axis in choices else 0 for axis in mesh]
    return codes
