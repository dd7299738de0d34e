"""Two shapes of one tensor share factors."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tutti.ops import parse
from tutti.ops.view import factorize


@st.composite
def pairs_of_shapes(draw):
    """Two ways to group a sequence of factors into dims, ones strewn in; or any two shapes of as many elements."""
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 4, 5]), min_size=0, max_size=6))

    def shape(factors):
        dims, left = [], list(factors)
        while left:
            n = draw(st.integers(1, len(left)))
            dims.append(prod(left[:n]))
            left = left[n:]
        return tuple(dims)

    return shape(factors), shape(draw(st.permutations(factors)) if draw(st.booleans()) else factors)


@given(pairs_of_shapes())
def test_factors_multiply_to_both_shapes_in_one_order(shapes):
    source, target = shapes
    left, right, sizes = factorize(source, target)
    rule = parse(f"{' '.join(left)} -> {' '.join(right)}", [source], [target], **sizes)
    for dims, shape in ((rule.inputs[0], source), (rule.outputs[0], target)):
        assert tuple(prod(rule.sizes[f] for f in dim) for dim in dims) == shape
    flat = [[f for dim in dims for f in dim if f not in rule.whole] for dims in (rule.inputs[0], rule.outputs[0])]
    assert flat[0] == flat[1], "what may be split is in both, in the same order"


@given(pairs_of_shapes())
def test_splitting_a_shared_factor_commutes_with_the_reshape(shapes):
    source, target = shapes
    left, right, sizes = factorize(source, target)
    rule = parse(f"{' '.join(left)} -> {' '.join(right)}", [source], [target], **sizes)
    x = torch.arange(prod(source)).view(source)
    for factor, size in rule.sizes.items():
        if factor in rule.whole or size == 1:
            continue
        for part in range(size):
            halves = [_select(rule, dims, t, factor, part) for dims, t in
                      ((rule.inputs[0], x), (rule.outputs[0], x.view(target)))]  # fmt: skip
            assert torch.equal(halves[0].flatten(), halves[1].flatten())


def _select(rule, dims, tensor, factor, part):
    """The elements whose digit `factor` is `part`."""
    dim, before, after = rule.position(dims, factor)
    return tensor.unflatten(dim, (before, rule.sizes[factor], after)).select(dim + 1, part)


@pytest.mark.parametrize(
    ("source", "target", "left", "right"),
    [
        ((6, 4), (2, 12), ["(a b)", "c"], ["a", "(b c)"]),
        ((8, 96), (8, 3, 32), ["a", "(b c)"], ["a", "b", "c"]),
        ((1, 5, 1), (5,), ["1", "a", "1"], ["a"]),
        ((), (1, 1), [], ["1", "1"]),
    ],
)
def test_examples(source, target, left, right):
    assert factorize(source, target)[:2] == (left, right)


def test_what_does_not_refine_stays_whole():
    left, right, _ = factorize((2, 3), (3, 2))
    assert all(text.endswith("!") for text in left + right)
    left, right, _ = factorize((4, 2, 3), (4, 3, 2))
    assert left[0] == right[0] == "a" and all(text.endswith("!") for text in left[1:] + right[1:])
