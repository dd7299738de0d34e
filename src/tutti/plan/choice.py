"""A choice: what one mesh axis does with one operator.

`m` splits factor m; `m/12` splits it inside 12 outer blocks; `t/2&e` splits t inside 2 blocks and e at once; `~0,1`
takes operands 0 and 1 as partial sums. Along an axis without a choice every rank computes the full operator.
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
    also: tuple[tuple[str, int], ...] = ()  # another factor that the axis splits at once, and its outer blocks

    def __str__(self) -> str:
        if self.linear:
            return "~" + ",".join(map(str, sorted(self.linear)))
        return "&".join(factor + (f"/{outer}" if outer != 1 else "") for factor, outer in self.splits)

    @property
    def splits(self) -> tuple[tuple[str, int], ...]:
        """(factor, outer) of all factors that the axis splits; empty if it takes partial sums."""
        return ((self.factor, self.outer), *self.also) if self.factor else ()

    def outer_of(self, factor: str) -> int | None:
        """The outer blocks of the split of a factor, or None if the axis does not split it."""
        return dict(self.splits).get(factor)


Choices = Mapping[str, Choice]  # by axis


def parse_choice(text: str) -> Choice:
    """The inverse of `str(choice)`."""
    if match := re.fullmatch(r"~(\d+(?:,\d+)*)", text):
        return Choice(linear=frozenset(map(int, match[1].split(","))))
    one = r"([A-Za-z_]\w*)(?:/(\d+))?"
    if match := re.fullmatch(rf"{one}(?:&{one})?", text):
        also = ((match[3], int(match[4] or 1)),) if match[3] else ()
        return Choice(match[1], int(match[2] or 1), also=also)
    raise ValueError(f"no choice {text!r}: write <factor>, <factor>/<outer>, <factor>&<factor> or ~<operands>")


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
    for factor, outer in choice.splits:
        if (position := rule.position(dims, factor)) is not None:
            return Split(position[0], position[1] * outer)
    return None


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
    for factor, other in rule.joint:
        size = rule.sizes[factor]
        if rule.sizes[other] and rule.sizes[other] % k == 0:
            outers = (outer for outer in sorted(cuts.get(factor, {1})) if size and size % (outer * k) == 0)
            yield from (Choice(factor, outer, also=((other, 1),)) for outer in outers)
    for operands in rule.linear:
        yield Choice(linear=operands)


def check(rule: Rule, choices: Choices, mesh: Mesh, where: str) -> None:
    """Raise ValueError if a choice is not legal for this operator."""
    for axis, choice in choices.items():
        if choice.linear:
            if choice.linear not in rule.linear:
                raise ValueError(f"{where}: not linear in operands {sorted(choice.linear)} (rule: {rule.notation})")
            continue
        if choice.also and (choice.factor, choice.also[0][0]) not in rule.joint:
            raise ValueError(f"{where}: an axis cannot split factors {choice} at once (rule: {rule.notation})")
        for factor, outer in choice.splits or (("", 1),):
            _check_split(rule, factor, outer, axis, choices, mesh, where)
        if alone := [a for f, _ in choice.also for a, c in choices.items() if c.factor == f]:
            raise ValueError(
                f"{where}: axis {axis!r} splits {choice} at once, axis {alone[0]!r} only {choices[alone[0]]}"
            )


def _check_split(rule: Rule, factor: str, outer: int, axis: str, choices: Choices, mesh: Mesh, where: str) -> None:
    if factor not in rule.sizes:
        raise ValueError(f"{where}: no factor {factor!r} (rule: {rule.notation})")
    if factor in rule.whole:
        raise ValueError(f"{where}: factor {factor!r} must stay whole (rule: {rule.notation})")
    if not rule.sizes[factor] or rule.sizes[factor] % (outer * mesh[axis]):
        raise ValueError(
            f"{where}: factor {factor!r} of size {rule.sizes[factor]} does not divide into "
            f"{outer} x {mesh[axis]} for axis {axis!r}"
        )
    others = {a: at for a, c in choices.items() if a != axis and (at := c.outer_of(factor)) is not None}
    if factor in rule.contiguous and outer != prod(mesh[a] for a, at in others.items() if at < outer):
        raise ValueError(f"{where}: the parts of factor {factor!r} must be contiguous (rule: {rule.notation})")
    for other, at in others.items():
        if outer <= at and at % (outer * mesh[axis]):  # neither split nests in the other
            raise ValueError(
                f"{where}: axes {axis!r} and {other!r} split factor {factor!r} at overlapping places, "
                f"{choices[axis]} and {choices[other]}"
            )


def legal(rule: Rule, choices: Choices, mesh: Mesh) -> bool:
    """Whether `check` accepts these choices."""
    try:
        check(rule, choices, mesh, "")
    except ValueError:
        return False
    return True


def nest(choice: Choice, taken: Choices, mesh: Mesh) -> Choice:
    """The choice, nested in the given choices that split the same factors at the same positions."""
    if not choice.factor:
        return choice
    (factor, outer), *also = [(f, _nested(f, outer, taken, mesh)) for f, outer in choice.splits]
    return Choice(factor, outer, also=tuple(also))


def _nested(factor: str, outer: int, taken: Choices, mesh: Mesh) -> int:
    again = True
    while again:
        again = False
        for axis, other in taken.items():
            if other.outer_of(factor) == outer:
                outer, again = outer * mesh[axis], True
    return outer
