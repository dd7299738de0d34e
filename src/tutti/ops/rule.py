"""A rule says, in one line, how an operator can be split.

    mm              "m k, k n -> m n"          split m or n: the output is split; split k: it is a partial sum
    reshape         "b s (h d) -> b s h d"     a dim may be a product of factors, major to minor
    mean            "b h:avg -> b 1"           another reduction than the sum; 1 is a dim of size one
    conv backward   "n o, n c:same -> n c, o"  an output without c is the same on all ranks
    native softmax  "b k! -> b k!"             k cannot be split
    log_softmax     "b v@ -> b v@"             splitting v needs the local computation registered with the rule
    embedding       "v* h, b s -> b s h"       as @, and the parts must be contiguous
    nll_loss        "n@ c*, n -> , ="          an output `=...` is already combined by the local computation
    addmm           "+n, m k, k n -> m n"      operand `+n` is added; if k is split, it becomes a partial sum too
    add             "a b, a b -> a b | ~01"    linear in operands 0 and 1 together: both may be partial sums
    cat             "a, a -> (2 a) | ~*"       linear in all operands together
    mul             "a b, a b -> a b | ~0 ~1"  linear in each operand alone
    experts         "t h, e* h -> t h | t&e"   an axis may split t and e at once; the local computation exchanges rows

A factor is an index of the operator's iteration space. Splitting a factor over an axis splits every operand dim that
contains it, replicates the operands without it, and makes the outputs without it partial.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import NoReturn

REDUCTIONS = ("sum", "avg", "max", "min")  # how partial results are combined
SAME = "same"  # as a reduction: each rank has the result already
Dims = tuple[tuple[str, ...], ...]  # the factors of each dim, major to minor; () for a dim of size one


@dataclass(frozen=True)
class Rule:
    """A parsed rule together with the sizes of its factors for one node."""

    notation: str
    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: dict[str, int]
    whole: frozenset[str] = frozenset()  # factors that must not be split
    local: frozenset[str] = frozenset()  # factors whose split needs the local computation
    contiguous: frozenset[str] = frozenset()  # factors that must not be split inside outer blocks
    even: frozenset[str] = frozenset()  # factors whose parts must be equal
    combine: dict[str, str] = field(default_factory=dict)  # factor -> operation that combines partial outputs
    combined: frozenset[int] = frozenset()  # outputs that are never partial
    added: frozenset[int] = frozenset()  # operands that are added to a sum over contracted factors
    linear: tuple[frozenset[int], ...] = ()  # sets of operands that may be partial sums together
    joint: tuple[tuple[str, str], ...] = ()  # pairs of factors that one axis may split at once

    def shape(self, dims: Dims) -> tuple[int, ...]:
        """The shape of an operand of these dims."""
        return tuple(prod(self.sizes[f] for f in factors) for factors in dims)

    def position(self, dims: Dims, factor: str) -> tuple[int, int, int] | None:
        """The dim of an operand that contains a factor, and the elements of its factors before it and after it."""
        for dim, factors in enumerate(dims):
            if factor in factors:
                i = factors.index(factor)
                return dim, prod(self.sizes[f] for f in factors[:i]), prod(self.sizes[f] for f in factors[i + 1 :])
        return None


def parse(notation: str, inputs: list[tuple[int, ...]], outputs: list[tuple[int, ...]], **sizes: int) -> Rule:
    """The rule for a line of notation and operands of these shapes.

    sizes: sizes of factors that only occur in products. Raises ValueError if notation and shapes contradict.
    """
    rule = read(notation)
    if inputs and not rule.inputs:  # nothing left of the arrow: one 0-d operand
        rule = replace(rule, inputs=((),))
    for operands, shapes, what in ((rule.inputs, inputs, "inputs"), (rule.outputs, outputs, "outputs")):
        if len(operands) != len(shapes):
            raise ValueError(f"rule {notation!r} has {len(operands)} {what}, the operator has {len(shapes)}")
        for i, (dims, shape) in enumerate(zip(operands, shapes, strict=True)):
            _measure(notation, f"{what[:-1]} {i}", dims, shape, sizes)
    return replace(rule, sizes=sizes)


@lru_cache(maxsize=10_000)
def read(notation: str) -> Rule:
    """Parse a line of notation to a rule without sizes. Raises ValueError if it is malformed."""

    def refuse(why: str) -> NoReturn:
        raise ValueError(f"rule {notation!r}{why}")

    body, _, marks = notation.partition("|")
    left, arrow, right = body.partition("->")
    if not arrow:
        refuse(" has no '->'")
    marked, combine = {"!": set(), "@": set(), "*": set()}, {}

    def operand(text: str) -> Dims:
        dims = []
        for group in re.findall(r"\([^()]*\)|[^\s()]+|[()]", text):
            if group in ("(", ")"):
                refuse(f": {group!r} without its other in {text.strip()!r}")
            factors = []
            for token in group.strip("()").split():
                match = re.fullmatch(r"(\w+)([!@*]?)(?::(\w+))?", token)
                if not match:
                    refuse(f": {token!r} is no factor; write name, name!, name@, name* or name:max")
                name, mark, operation = match.groups()
                if mark:
                    marked[mark].add(name)
                if operation:
                    if operation not in (*REDUCTIONS, SAME):
                        refuse(f": {token!r} is combined by none of {', '.join((*REDUCTIONS, SAME))}")
                    combine[name] = operation
                if name != "1":
                    factors.append(name)
            dims.append(tuple(factors))
        return tuple(dims)

    lefts = left.split(",") if left.strip() else []
    rights = right.split(",")
    ins = tuple(operand(part.replace("+", " ")) for part in lefts)
    outs = tuple(operand(part.replace("=", " ")) for part in rights)
    linear, joint = [], []
    for mark in marks.split():
        if match := re.fullmatch(r"(\w+)&(\w+)", mark):
            joint.append((match[1], match[2]))
            continue
        if not re.fullmatch(r"~(\d+|\*)", mark):
            refuse(f": {mark!r} is no mark; write ~0, ~01 (linear together), ~* or a&b (split by one axis at once)")
        numbers = range(len(ins)) if mark == "~*" else sorted(map(int, mark[1:]))
        if beyond := [i for i in numbers if i >= max(1, len(ins))]:
            refuse(f" has {len(ins)} operands: there is no operand {beyond[0]} to be linear in ({mark}, from 0)")
        linear.append(frozenset(numbers))
    return Rule(
        notation, ins, outs, {},
        whole=frozenset(marked["!"]),
        local=frozenset(marked["@"] | marked["*"]),
        contiguous=frozenset(marked["*"]),
        even=frozenset(marked["@"] | marked["*"]),
        combine=combine,
        combined=frozenset(i for i, part in enumerate(rights) if part.strip().startswith("=")),
        added=frozenset(i for i, part in enumerate(lefts) if part.strip().startswith("+")),
        linear=tuple(linear),
        joint=tuple(joint),
    )  # fmt: skip


def _measure(notation: str, which: str, dims: Dims, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
    """Infer the sizes of factors from a shape, and check those that are known."""
    if len(dims) != len(shape):
        raise ValueError(
            f"rule {notation!r} names {len(dims)} dims of {which}, whose shape {tuple(shape)} has {len(shape)}: write "
            "a factor for every dim, batch dims too (b m k, not m k); see docs/extend/operator.md"
        )
    for factors, size in zip(dims, shape, strict=True):
        unknown = [f for f in factors if f not in sizes]
        product = prod(sizes[f] for f in factors if f in sizes)
        if size == 0 and not factors:
            continue  # an optional output that is not made
        if len(unknown) == 1 and product and size % product == 0:
            sizes[unknown[0]] = size // product
        elif unknown or product != size:
            raise ValueError(f"rule {notation!r} does not fit a dim of size {size}: {factors} with sizes {sizes}")
