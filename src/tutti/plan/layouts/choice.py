"""A choice: what one mesh axis does with one operator.

`m` splits factor m; `m/12` splits it inside 12 outer blocks; `m*1` splits it unevenly, `m*64` in blocks of 64;
`t/2&e` splits t inside 2 blocks and e at once; `~0,1` takes operands 0 and 1 as partial sums. Along an axis without a
choice every rank computes the full operator.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from tutti.ops.rule import SAME, Dims, Rule
from tutti.plan.layouts.layout import Digit, Layout, Mesh, Partial, Placement, R, Split, digits_of, position_text

Position = tuple[int, int]  # where a factor may be split: its outer blocks, and the unit of an uneven split
WHOLE: Position = (1, 1)


@dataclass(frozen=True, order=True)
class Choice:
    factor: str = ""
    outer: int = 1
    linear: frozenset[int] = frozenset()
    unit: int = 0  # elements of a block of an uneven split; 0 if the split is even
    also: tuple[tuple[str, int], ...] = ()  # another factor that the axis splits at once, and its outer blocks

    def __str__(self) -> str:
        if self.linear:
            return "~" + ",".join(map(str, sorted(self.linear)))
        return "&".join(factor + position_text(outer, self.unit_of(factor)) for factor, outer in self.splits)

    @property
    def splits(self) -> tuple[tuple[str, int], ...]:
        """(factor, outer) of all factors that the axis splits; empty if it takes partial sums."""
        return ((self.factor, self.outer), *self.also) if self.factor else ()

    def outer_of(self, factor: str) -> int | None:
        """The outer blocks of the split of a factor, or None if the axis does not split it."""
        return dict(self.splits).get(factor)

    def unit_of(self, factor: str) -> int:
        """The unit of the split of a factor."""
        return self.unit if factor == self.factor else 0


Choices = Mapping[str, Choice]  # by axis


def parse_choice(text: str) -> Choice:
    """The inverse of `str(choice)`."""
    if match := re.fullmatch(r"~(\d+(?:,\d+)*)", text):
        return Choice(linear=frozenset(map(int, match[1].split(","))))
    one = r"([A-Za-z_]\w*)(?:/(\d+))?"
    if match := re.fullmatch(rf"{one}(?:\*(\d+))?(?:&{one})?", text):
        also = ((match[4], int(match[5] or 1)),) if match[4] else ()
        return Choice(match[1], int(match[2] or 1), unit=int(match[3] or 0), also=also)
    raise ValueError(
        f"no choice {text!r}: write <factor>, <factor>/<outer>, <factor>*<unit>, <factor>&<factor> or ~<operands>"
    )


def input_placement(rule: Rule, choice: Choice, operand: int) -> Placement:
    """The placement along an axis that this choice requires of an operand."""
    if choice.linear:
        return Partial() if operand in choice.linear else R
    split = _split(rule, rule.inputs[operand], choice)
    if split is None and operand in rule.added and not any(_split(rule, o, choice) for o in rule.outputs):
        return Partial()
    return split or R


def output_placement(rule: Rule, choice: Choice, output: int) -> Placement:
    """The placement of an output along an axis under this choice."""
    if choice.linear:
        return Partial()
    split = _split(rule, rule.outputs[output], choice)
    if split is not None:
        return split
    operation = rule.combine.get(choice.factor, "sum")
    return R if output in rule.combined or operation == SAME else Partial(operation)


def _split(rule: Rule, dims: Dims, choice: Choice) -> Split | None:
    for factor, outer in choice.splits:
        if (position := rule.position(dims, factor)) is not None:
            dim, before, after = position
            return Split(dim, before * outer, choice.unit_of(factor) * after)
    return None


def layouts(rule: Rule, choices: Choices) -> tuple[list[Layout], list[Layout]]:
    """The layouts of all operands and outputs of an operator under these choices."""
    ins = [Layout.of({a: input_placement(rule, c, i) for a, c in choices.items()}) for i in range(len(rule.inputs))]
    outs = [Layout.of({a: output_placement(rule, c, i) for a, c in choices.items()}) for i in range(len(rule.outputs))]
    return ins, outs


def candidates(rule: Rule, cuts: Mapping[str, set[Position]], k: int) -> Iterator[Choice]:
    """All legal choices of an axis of size k. cuts: where each factor may be split."""
    for factor, size in rule.sizes.items():
        if factor in rule.whole or not size:
            continue
        positions: dict[tuple[int, int], None] = {}
        for outer, unit in sorted(cuts.get(factor, {WHOLE})):
            if outer > 1 and factor in rule.contiguous:
                continue
            if size % (outer * k) == 0:
                positions[outer, 0] = None
            blocks = size // (outer * unit)
            if factor not in rule.even and blocks >= k and blocks % k and (outer == 1 or factor not in rule.local):
                positions[outer, unit] = None
        for outer, unit in positions:
            yield Choice(factor, outer, unit=unit)
    for factor, other in rule.joint:
        size = rule.sizes[factor]
        if rule.sizes[other] and rule.sizes[other] % k == 0:
            outers = sorted({outer for outer, _ in cuts.get(factor, {WHOLE}) if size and size % (outer * k) == 0})
            yield from (Choice(factor, outer, also=((other, 1),)) for outer in outers)
    for operands in rule.linear:
        yield Choice(linear=operands)


def waste(rule: Rule, choice: Choice, k: int) -> float:
    """How much more the first of k ranks computes than the mean, as a fraction: 0.2 if it has 3 of 10 blocks on 4."""
    if not choice.unit:
        return 0.0
    blocks = max(1, rule.sizes[choice.factor] // (choice.outer * choice.unit))
    return -(-blocks // k) * k / blocks - 1


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
    for factor in dict.fromkeys(f for c in choices.values() for f, _ in c.splits):
        try:
            factor_digits(rule, choices, factor, mesh)
        except ValueError as error:
            shown = ", ".join(f"{a}: {c}" for a, c in choices.items() if c.outer_of(factor) is not None)
            raise ValueError(f"{where}: factor {factor!r} cannot be split as {shown}: {error}") from None


def _check_split(rule: Rule, factor: str, outer: int, axis: str, choices: Choices, mesh: Mesh, where: str) -> None:
    unit = choices[axis].unit_of(factor)
    if factor not in rule.sizes:
        raise ValueError(f"{where}: no factor {factor!r} (rule: {rule.notation})")
    if factor in rule.whole:
        raise ValueError(f"{where}: factor {factor!r} must stay whole (rule: {rule.notation})")
    if unit and (factor in rule.even or choices[axis].also):
        raise ValueError(f"{where}: the parts of factor {factor!r} must be equal (rule: {rule.notation})")
    if not unit and (not rule.sizes[factor] or rule.sizes[factor] % (outer * mesh[axis])):
        raise ValueError(
            f"{where}: factor {factor!r} of size {rule.sizes[factor]} does not divide into "
            f"{outer} x {mesh[axis]} for axis {axis!r}"
        )
    others = {a: at for a, c in choices.items() if a != axis and (at := c.outer_of(factor)) is not None}
    contiguous = factor in rule.contiguous or (unit and factor in rule.local)
    if contiguous and outer != prod(mesh[a] for a, at in others.items() if at < outer):
        raise ValueError(f"{where}: the parts of factor {factor!r} must be contiguous (rule: {rule.notation})")


def factor_digits(rule: Rule, choices: Choices, factor: str, mesh: Mesh) -> list[Digit]:
    """A factor as a mixed-radix number. See `plan.layouts.layout`."""
    at = {axis: outer for axis, c in choices.items() if (outer := c.outer_of(factor)) is not None}
    return digits_of([(outer, choices[a].unit_of(factor), a) for a, outer in at.items()], rule.sizes[factor], mesh)


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
    outer, unit = _nested(choice.factor, choice.outer, choice.unit, taken, mesh)
    also = tuple((factor, _nested(factor, outer, 0, taken, mesh)[0]) for factor, outer in choice.also)
    return Choice(choice.factor, outer, unit=unit, also=also)


def _nested(factor: str, outer: int, unit: int, taken: Choices, mesh: Mesh) -> tuple[int, int]:
    again = True
    while again:
        again = False
        for axis, other in taken.items():
            if other.outer_of(factor) == outer:
                outer, unit, again = outer * mesh[axis], other.unit_of(factor) or unit, True
    return outer, unit
