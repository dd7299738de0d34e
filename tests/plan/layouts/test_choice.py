"""What an axis does with an operator, and what that means for operands and outputs."""

import pytest

from tutti.ops import parse
from tutti.plan.layouts.choice import Choice, candidates, check, layouts, legal, nest, parse_choice
from tutti.plan.layouts.layout import Layout, Partial, R, Split

MM = parse("m k, k n -> m n | ~0 ~1", [(8, 6), (6, 4)], [(8, 4)])
ADDMM = parse("+n, m k, k n -> m n | ~01", [(4,), (8, 6), (6, 4)], [(8, 4)])


@pytest.mark.parametrize("text", ["m", "m/12", "m*1", "m/3*64", "~0", "~0,1"])
def test_text_round_trip(text):
    assert str(parse_choice(text)) == text


def test_text_that_is_none():
    with pytest.raises(ValueError, match=r"no choice '~a': write <factor>, <factor>/<outer>, <factor>\*<unit>, "):
        parse_choice("~a")


@pytest.mark.parametrize(
    ("rule", "choice", "ins", "outs"),
    [
        (MM, "m", [Split(0), R], [Split(0)]),
        (MM, "n", [R, Split(1)], [Split(1)]),
        (MM, "k", [Split(1), Split(0)], [Partial()]),
        (MM, "m/2", [Split(0, 2), R], [Split(0, 2)]),
        (MM, "~1", [R, Partial()], [Partial()]),
        (ADDMM, "k", [Partial(), Split(1), Split(0)], [Partial()]),
        (ADDMM, "n", [Split(0), R, Split(1)], [Split(1)]),
        (ADDMM, "m", [R, Split(0), R], [Split(0)]),
        (parse("a:avg b -> b", [(4, 2)], [(2,)]), "a", [Split(0)], [Partial("avg")]),
        (parse("(g r) -> g r", [(6,)], [(2, 3)], r=3), "r", [Split(0, 2)], [Split(1)]),
        (parse("n@ c*, n -> , =", [(4, 6), (4,)], [(), ()]), "c", [Split(1), R], [Partial(), R]),
    ],
)
def test_layouts(rule, choice, ins, outs):
    in_and_out = layouts(rule, {"tp": parse_choice(choice)})
    assert in_and_out == ([Layout.of({"tp": p}) for p in ins], [Layout.of({"tp": p}) for p in outs])


def test_candidates_divide_and_respect_marks():
    rule = parse("a! b c*, -> b c | ~0", [(4, 6, 8), ()], [(6, 8)])
    names = set(map(str, candidates(rule, {"b": {(1, 1), (3, 1)}, "c": {(1, 1), (2, 1)}}, 2)))
    assert names == {"b", "b/3", "c", "~0"}
    assert set(map(str, candidates(rule, {"b": {(1, 1), (3, 1)}}, 3))) == {"b", "~0"}, "c has a local computation"
    assert set(map(str, candidates(rule, {"b": {(1, 1), (1, 2), (1, 3)}}, 4))) == {"b*1", "c", "~0"}


def test_a_choice_goes_inside_of_those_that_hold_the_place():
    mesh = {"dp": 2, "tp": 4}
    assert nest(Choice("m"), {"dp": Choice("m")}, mesh) == Choice("m", 2)
    assert nest(Choice("m"), {"dp": Choice("m", 2), "tp": Choice("m")}, mesh) == Choice("m", 4)
    assert nest(Choice("m"), {"dp": Choice("k")}, mesh) == Choice("m")


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("z", "no factor 'z'"),
        ("a", "factor 'a' must stay whole"),
        ("b/4", "factor 'b' of size 6 does not divide into 4 x 2 for axis 'tp'"),
        ("c/2", r"the parts of factor 'c' must be contiguous \(rule: a! b c\*"),
        ("~1", r"not linear in operands \[1\]"),
    ],
)
def test_illegal_choices_name_the_rule(choice, message):
    rule = parse("a! b c*, -> b c | ~0", [(4, 6, 8), ()], [(6, 8)])
    with pytest.raises(ValueError, match=f"^here: {message}"):
        check(rule, {"tp": parse_choice(choice)}, {"tp": 2}, "here")
    assert not legal(rule, {"tp": parse_choice(choice)}, {"tp": 2})


def test_contiguous_parts_of_two_axes_are_legal():
    rule = parse("v*, -> v", [(8,), ()], [(8,)])
    assert legal(rule, {"a": Choice("v"), "b": Choice("v", 2)}, {"a": 2, "b": 2})
    assert not legal(rule, {"a": Choice("v"), "b": Choice("v", 4)}, {"a": 2, "b": 2})
