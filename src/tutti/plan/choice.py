"""A choice: what one mesh axis does with one operator.

`m` splits factor m; `m/12` splits it inside 12 outer blocks; `~0,1` takes operands 0 and 1 as partial sums. Along an
axis without a choice every rank computes the full operator.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from tutti.ops.rule import SAME, Dims, Rule
from tutti.plan.layout import Layout, Mesh, Partial, Placement, R, Split


@dataclass(frozen=True, order=True)
class Choice:
    factor: str = ""
    outer: int = 1
    linear: frozenset[int] = frozenset()

    def __str__(self) -> str:
        if self.linear:
            return "~" + ",".join(map(str, sorted(self.linear)))
        return self.factor + (f"/{self.outer}" if self.outer != 1 else "")


Choices = Mapping[str, Choice]  # by axis


def parse_choice(text: str) -> Choice:
    """The inverse of `str(choice)`."""
    if match := re.fullmatch(r"~(\d+(?:,\d+)*)", text):
        return Choice(linear=frozenset(map(int, match[1].split(","))))
    if match := re.fullmatch(r"([A-Za-z_]\w*)(?:/(\d+))?", text):
        return Choice(match[1], int(match[2] or 1))
    raise ValueError(f"no choice {text!r}: write <factor>, <factor>/<outer> or ~<operands>")


def input_placement(rule: Rule, choice: Choice, operand: int) -> Placement:
    """The placement along an axis that this choice requires of an operand."""
    if choice.linear:
        return Partial() if operand in choice.linear else R
    held = _split(rule, rule.inputs[operand], choice)
    if held is None and operand in rule.added and not any(_split(rule, o, choice) for o in rule.outputs):
        return Partial()
    return held or R


def output_placement(rule: Rule, choice: Choice, output: int) -> Placement:
    """The placement of an output along an axis under this choice."""
    if choice.linear:
        return Partial()
    held = _split(rule, rule.outputs[output], choice)
    if held is not None:
        return held
    operation = rule.combine.get(choice.factor, "sum")
    return R if output in rule.combined or operation == SAME else Partial(operation)


def _split(rule: Rule, dims: Dims, choice: Choice) -> Split | None:
    position = rule.position(dims, choice.factor)
    return None if position is None else Split(position[0], position[1] * choice.outer)


def layouts(rule: Rule, choices: Choices) -> tuple[list[Layout], list[Layout]]:
    """The layouts of all operands and outputs of an operator under these choices."""
    ins = [Layout.of({a: input_placement(rule, c, i) for a, c in choices.items()}) for i in range(len(rule.inputs))]
    outs = [Layout.of({a: output_placement(rule, c, i) for a, c in choices.items()}) for i in range(len(rule.outputs))]
    return ins, outs


def candidates(rule: Rule, cuts: Mapping[str, set[int]], k: int) -> Iterator[Choice]:
    """All legal choices of an axis of size k. cuts: the positions at which each factor may be split."""
    for factor, size in rule.sizes.items():
        if factor not in rule.whole:
            for outer in sorted(cuts.get(factor, {1})):
                if size and size % (outer * k) == 0 and (outer == 1 or factor not in rule.contiguous):
                    yield Choice(factor, outer)
    for operands in rule.linear:
        yield Choice(linear=operands)


def check(rule: Rule, choices: Choices, mesh: Mesh, where: str) -> None:
    """Raise ValueError if a choice is not legal for this operator."""
    for axis, choice in choices.items():
        if choice.linear:
            if choice.linear not in rule.linear:
                raise ValueError(f"{where}: not linear in operands {sorted(choice.linear)} (rule: {rule.notation})")
        elif choice.factor not in rule.sizes:
            raise ValueError(f"{where}: no factor {choice.factor!r} (rule: {rule.notation})")
        elif choice.factor in rule.whole:
            raise ValueError(f"{where}: factor {choice.factor!r} must stay whole (rule: {rule.notation})")
        elif not rule.sizes[choice.factor] or rule.sizes[choice.factor] % (choice.outer * mesh[axis]):
            raise ValueError(
                f"{where}: factor {choice.factor!r} of size {rule.sizes[choice.factor]} does not divide into "
                f"{choice.outer} x {mesh[axis]} for axis {axis!r}"
            )
        elif choice.factor in rule.contiguous and choice.outer != _outside(axis, choices, mesh):
            raise ValueError(
                f"{where}: the parts of factor {choice.factor!r} must be contiguous (rule: {rule.notation})"
            )
        elif other := _overlapping(axis, choices, mesh):
            raise ValueError(
                f"{where}: axes {axis!r} and {other!r} split factor {choice.factor!r} at overlapping places, "
                f"{choice} and {choices[other]}"
            )


def _overlapping(axis: str, choices: Choices, mesh: Mesh) -> str | None:
    """Another axis that splits the same factor such that neither split nests in the other; None if there is none."""
    own = choices[axis]
    for other, choice in choices.items():
        inside = choice.factor == own.factor and own.outer <= choice.outer and other != axis
        if inside and choice.outer % (own.outer * mesh[axis]):
            return other
    return None


def _outside(axis: str, choices: Choices, mesh: Mesh) -> int:
    """The number of parts that other axes split the same factor into, outside this axis."""
    own = choices[axis]
    return prod(mesh[a] for a, c in choices.items() if c.factor == own.factor and c.outer < own.outer)


def legal(rule: Rule, choices: Choices, mesh: Mesh) -> bool:
    """Whether `check` accepts these choices."""
    try:
        check(rule, choices, mesh, "")
    except ValueError:
        return False
    return True


def nest(choice: Choice, taken: Choices, mesh: Mesh) -> Choice:
    """The choice, nested in the given choices that split the same factor at the same position."""
    outer, again = choice.outer, True
    while again:
        again = False
        for axis, other in taken.items():
            if not choice.linear and other.factor == choice.factor and other.outer == outer:
                outer, again = outer * mesh[axis], True
    return Choice(choice.factor, outer, choice.linear)
