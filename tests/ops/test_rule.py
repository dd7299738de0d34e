"""The notation of rules."""

import pytest

from tutti.ops import parse


def test_factors_get_their_sizes_from_the_shapes():
    rule = parse("m k, k n -> m n", [(2, 3), (3, 5)], [(2, 5)])
    assert rule.sizes == {"m": 2, "k": 3, "n": 5}
    assert rule.inputs == ((("m",), ("k",)), (("k",), ("n",))) and rule.outputs == ((("m",), ("n",)),)


def test_a_dim_may_be_a_product_of_factors():
    rule = parse("b (h d) -> b h d", [(2, 12)], [(2, 3, 4)], h=3)
    assert rule.sizes == {"b": 2, "h": 3, "d": 4}
    assert rule.position(rule.inputs[0], "d") == (1, 3, 1) and rule.position(rule.outputs[0], "d") == (2, 1, 1)
    assert rule.position(rule.inputs[0], "z") is None


def test_sizes_that_shapes_do_not_tell_are_given():
    rule = parse("a (y! z) -> a z, a z", [(2, 6)], [(2, 3), (2, 3)], z=3)
    assert rule.sizes == {"a": 2, "y": 2, "z": 3} and rule.whole == {"y"}


def test_marks():
    rule = parse("+n, m k!, k n@ v* -> m n v, = | ~01 ~02", [(5,), (2, 3), (3, 5, 7)], [(2, 5, 7), ()])
    assert rule.whole == {"k"} and rule.local == {"n", "v"} and rule.contiguous == {"v"}
    assert rule.added == {0} and rule.combined == {1}
    assert rule.linear == (frozenset({0, 1}), frozenset({0, 2}))
    assert parse("a, a -> a | ~*", [(2,), (2,)], [(2,)]).linear == (frozenset({0, 1}),)
    assert parse("a:avg b -> 1 b", [(4, 2)], [(1, 2)]).combine == {"a": "avg"}


def test_a_dim_of_size_one_and_a_scalar_have_no_factors():
    rule = parse("1 a, -> a", [(1, 4), ()], [(4,)])
    assert rule.inputs == (((), ("a",)), ())
    assert parse("->", [], [()]).inputs == ()


def test_an_optional_output_that_is_not_made():
    assert parse("a -> a, 1", [(4,)], [(4,), (0,)]).outputs == ((("a",),), ((),))


@pytest.mark.parametrize(
    ("notation", "inputs", "outputs", "message"),
    [
        ("m k", [(2, 3)], [], "has no '->'"),
        ("m k -> m", [(2, 3), (3,)], [(2,)], "has 1 inputs, the operator has 2"),
        ("m k -> m, k", [(2, 3)], [(2,)], "has 2 outputs, the operator has 1"),
        (
            "m k -> m",
            [(2, 3, 4)],
            [(2,)],
            r"rule 'm k -> m' names 2 dims of input 0, whose shape \(2, 3, 4\) has 3: write a factor for every dim, "
            r"batch dims too \(b m k, not m k\); see docs/extend/operator\.md",
        ),
        ("m k, k n -> m n", [(2, 3), (4, 5)], [(2, 5)], "does not fit a dim of size 4"),
        ("(a b) -> a b", [(6,)], [(2, 4)], "does not fit a dim of size 6"),
        ("1 a -> a", [(2, 3)], [(3,)], "does not fit a dim of size 2"),
        ("b (d, d e -> b e", [(2, 3), (3, 4)], [(2, 4)], r"'\(' without its other in 'b \(d'"),
        ("b d) -> b d", [(2, 3)], [(2, 3)], r"'\)' without its other in 'b d\)'"),
        ("b ((d e) f) -> b d", [(2, 3)], [(2, 3)], r"'\(' without its other"),
        ("b d? -> b d", [(2, 3)], [(2, 3)], r"'d\?' is no factor; write name, name!, name@, name\* or name:max"),
        ("b d:bogus -> b", [(2, 3)], [(2,)], "'d:bogus' is combined by none of sum, avg, max, min, same"),
        ("b d, d -> b | ~7", [(2, 3), (3,)], [(2,)], "has 2 operands: there is no operand 7 to be linear in"),
        ("b d -> b | foo", [(2, 3)], [(2,)], r"'foo' is no mark; write ~0, ~01 \(linear together\), ~\* or a&b"),
        ("b d -> b | ~0 1", [(2, 3)], [(2,)], "'1' is no mark; write"),
    ],
)
def test_errors_name_the_rule(notation, inputs, outputs, message):
    with pytest.raises(ValueError, match=message) as error:
        parse(notation, inputs, outputs)
    assert repr(notation) in str(error.value)
