"""Positions of parts of parts."""

from math import prod

from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.ops.create import _of_part
from tutti.plan.layouts.layout import Layout, Split


def positions(sizes, strides, offset):
    """The positions of all elements, in order."""
    offsets = [offset]
    for size, stride in zip(sizes, strides, strict=True):
        offsets = [at + digit * stride for at in offsets for digit in range(size)]
    return offsets


@settings(max_examples=300)
@given(st.data())
def test_a_part_of_a_part_lies_where_it_lay_before(data):
    sizes = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3))
    strides = [7 * 10 ** (len(sizes) - i) for i in range(len(sizes))]  # each digit can be told from the others
    offset, count = data.draw(st.integers(0, 5)), prod(sizes)
    k = data.draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
    outer = data.draw(st.sampled_from([n for n in range(1, count // k + 1) if (count // k) % n == 0]))
    mesh, rank = {"a": k}, data.draw(st.integers(0, k - 1))
    part = Layout.of({"a": Split(0, outer)}).indices((count,), mesh, {"a": rank})
    strided = _of_part(part, sizes, strides, offset)
    if strided is not None:
        whole = positions(sizes, strides, offset)
        assert positions(*strided) == [whole[i] for i in positions(*part)]


def test_a_split_of_a_digit_is_found():
    sizes, strides = [2, 6, 4], [700, 70, 7]
    for outer, k in ((1, 2), (2, 2), (2, 3), (2, 6), (12, 4), (6, 2), (4, 12), (1, 4), (1, 3)):
        part = Layout.of({"a": Split(0, outer)}).indices((48,), {"a": k}, {"a": k - 1})
        assert (_of_part(part, sizes, strides, 0) is None) == ((outer, k) == (1, 3)), (
            "a third lies across the two halves"
        )
