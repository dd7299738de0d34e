"""A choice: what one mesh axis does with one operator.

`m` splits factor m; `m/12` splits it inside 12 outer blocks; `m*1` splits it unevenly, `m*64` in blocks of 64; `~0,1`
takes operands 0 and 1 as partial sums. Along an axis without a choice every rank computes the full operator.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from tutti.ops.rule import SAME, Dims, Rule
from tutti.plan.layout import Digit, Layout, Mesh, Partial, Placement, R, Split, digits_of, position_text

Position = tuple[int, int]  # where a factor may be split: its outer blocks, and the unit of an uneven split
WHOLE: Position = (1, 1)


@dataclass(frozen=True, order=True)
class Choice:
    factor: str = ""
    outer: int = 1
    linear: frozenset[int] = frozenset()
    unit: int = 0  # elements of a block of an uneven split; 0 if the split is even

    def __str__(self) -> str:
        if self.linear:
            return "~" + ",".join(map(str, sorted(self.linear)))
        return self.factor + position_text(self.outer, self.unit)


Choices = Mapping[str, Choice]  # by axis


def parse_choice(text: str) -> Choice:
    """The inverse of `str(choice)`."""
    if match := re.fullmatch(r"~(\d+(?:,\d+)*)", text):
        return Choice(linear=frozenset(map(int, match[1].split(","))))
    if match := re.fullmatch(r"([A-Za-z_]\w*)(?:/(\d+))?(?:\*(\d+))?", text):
        return Choice(match[1], int(match[2] or 1), unit=int(match[3] or 0))
    raise ValueError(f"no choice {text!r}: write <factor>, <factor>/<outer>, <factor>*<unit> or ~<operands>")


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
    if position is None:
        return None
    dim, before, after = position
    return Split(dim, before * choice.outer, choice.unit * after)


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
        found: dict[tuple[int, int], None] = {}
        for outer, unit in sorted(cuts.get(factor, {WHOLE})):
            if outer > 1 and factor in rule.contiguous:
                continue
            if size % (outer * k) == 0:
                found[outer, 0] = None
            blocks = size // (outer * unit)
            if factor not in rule.even and blocks >= k and blocks % k and (outer == 1 or factor not in rule.local):
                found[outer, unit] = None
        for outer, unit in found:
            yield Choice(factor, outer, unit=unit)
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
        factor = choice.factor
        if factor not in rule.sizes:
            raise ValueError(f"{where}: no factor {factor!r} (rule: {rule.notation})")
        if factor in rule.whole:
            raise ValueError(f"{where}: factor {factor!r} must stay whole (rule: {rule.notation})")
        if choice.unit and factor in rule.even:
            raise ValueError(f"{where}: the parts of factor {factor!r} must be equal (rule: {rule.notation})")
        if not choice.unit and (not rule.sizes[factor] or rule.sizes[factor] % (choice.outer * mesh[axis])):
            raise ValueError(
                f"{where}: factor {factor!r} of size {rule.sizes[factor]} does not divide into "
                f"{choice.outer} x {mesh[axis]} for axis {axis!r}"
            )
        contiguous = factor in rule.contiguous or (choice.unit and factor in rule.local)
        if contiguous and choice.outer != _outside(axis, choices, mesh):
            raise ValueError(f"{where}: the parts of factor {factor!r} must be contiguous (rule: {rule.notation})")
    for factor in dict.fromkeys(c.factor for c in choices.values() if c.factor):
        try:
            factor_digits(rule, choices, factor, mesh)
        except ValueError as error:
            shown = ", ".join(f"{axis}: {c}" for axis, c in choices.items() if c.factor == factor)
            raise ValueError(f"{where}: factor {factor!r} cannot be split as {shown}: {error}") from None


def factor_digits(rule: Rule, choices: Choices, factor: str, mesh: Mesh) -> list[Digit]:
    """A factor as a mixed-radix number. See `plan.layout`."""
    splits = [(c.outer, c.unit, axis) for axis, c in choices.items() if c.factor == factor]
    return digits_of(splits, rule.sizes[factor], mesh)


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
    outer, unit, again = choice.outer, choice.unit, True
    while again:
        again = False
        for axis, other in taken.items():
            if not choice.linear and other.factor == choice.factor and other.outer == outer:
                outer, unit, again = outer * mesh[axis], other.unit or unit, True
    return Choice(choice.factor, outer, choice.linear, unit)
