"""Layouts take tensors apart and put them together again."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tutti.plan.layouts.layout import (
    Layout,
    Partial,
    R,
    Split,
    coordinates_of,
    devices,
    group_of,
    inside_node,
    parse_placement,
)

AXES = "abc"


@st.composite
def laid_out(draw):
    """(layout, shape, mesh) with strided splits and several axes on a dim in any order, replicas and partial sums."""
    mesh = {axis: draw(st.integers(1, 3)) for axis in AXES[: draw(st.integers(1, 3))]}
    rank, placements = draw(st.integers(1, 3)), {}
    shape = [1] * rank
    for axis in draw(st.permutations(list(mesh))):
        kind = draw(st.sampled_from(["split", "split", "replicate", "partial"]))
        if kind == "split":
            dim, gap = draw(st.integers(0, rank - 1)), draw(st.integers(1, 3))
            unit = draw(st.integers(0, 2))
            placements[axis] = Split(dim, shape[dim] * gap, unit)
            shape[dim] *= gap * mesh[axis] if unit == 0 else gap * unit * (mesh[axis] + draw(st.integers(0, 2)))
        elif kind == "partial":
            placements[axis] = Partial()
    shape = tuple(n * draw(st.integers(1, 3)) for n in shape)
    return Layout.of(placements), shape, mesh


def parts(layout, whole, mesh):
    return [layout.local_slice(whole, mesh, coordinates_of(rank, mesh)) for rank in range(devices(mesh))]


@given(laid_out())
def test_assemble_is_the_inverse_of_local_slice(case):
    layout, shape, mesh = case
    if not layout.fits(shape, mesh):
        return
    whole = torch.arange(prod(shape), dtype=torch.float32).view(shape) + 1
    shards = parts(layout, whole, mesh)
    wanted = [layout.local_shape(shape, mesh, coordinates_of(rank, mesh)) for rank in range(devices(mesh))]
    assert [tuple(part.shape) for part in shards] == wanted
    assert layout.local_shape(shape, mesh) == tuple(map(max, zip(*wanted, strict=True))), "the first has most"
    assert layout.uneven(shape, mesh) == (len(set(wanted)) > 1)
    assert torch.equal(layout.assemble(shards, shape, mesh), whole)


@given(laid_out())
def test_indices_say_where_local_elements_lie(case):
    layout, shape, mesh = case
    layout = Layout.of(layout.splits)
    if not layout.fits(shape, mesh):
        return
    whole = torch.arange(prod(shape)).view(shape)
    for rank, part in enumerate(parts(layout, whole, mesh)):
        sizes, strides, offset = layout.indices(shape, mesh, coordinates_of(rank, mesh))
        positions = torch.tensor(offset)
        for size, stride in zip(sizes, strides, strict=True):
            positions = positions.unsqueeze(-1) + torch.arange(size) * stride
        assert torch.equal(positions.flatten(), part.flatten())


@given(laid_out())
def test_digits_multiply_to_the_dim(case):
    layout, shape, mesh = case
    if not layout.fits(shape, mesh):
        return
    for dim, size in enumerate(shape):
        digits = layout.digits(dim, size, mesh)
        assert prod(n for n, _ in digits) == size
        outer = 1
        for n, axes in digits:
            assert not axes or (layout[axes[0]].dim == dim and layout[axes[0]].outer == outer)
            outer *= n


@given(laid_out())
def test_text_round_trip(case):
    for _, placement in case[0].placements:
        assert parse_placement(str(placement)) == placement


def test_a_strided_split_takes_a_part_of_each_block():
    whole, mesh = torch.arange(12), {"tp": 2}
    shards = parts(Layout.of({"tp": Split(0, 3)}), whole, mesh)
    assert [part.tolist() for part in shards] == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]


def test_the_axis_with_the_smaller_outer_is_the_outer_one():
    whole, mesh = torch.arange(4), {"a": 2, "b": 2}
    inner, outer = Layout.of({"a": Split(0), "b": Split(0, 2)}), Layout.of({"a": Split(0, 2), "b": Split(0)})
    assert [part.item() for part in parts(inner, whole, mesh)] == [0, 1, 2, 3]
    assert [part.item() for part in parts(outer, whole, mesh)] == [0, 2, 1, 3]


def test_ranks_are_numbered_row_major():
    mesh = {"dp": 2, "tp": 3}
    assert [coordinates_of(rank, mesh) for rank in (0, 1, 3, 5)] == [
        {"dp": 0, "tp": 0}, {"dp": 0, "tp": 1}, {"dp": 1, "tp": 0}, {"dp": 1, "tp": 2},
    ]  # fmt: skip
    assert group_of(4, "tp", mesh) == [3, 4, 5] and group_of(4, "dp", mesh) == [1, 4]


def test_parts_of_an_axis():
    mesh = {"dp": 2, "ep": 4, "tp": 2}
    assert group_of(13, "ep", mesh) == [9, 11, 13, 15]
    assert group_of(13, "ep%2", mesh) == [13, 15] and group_of(13, "ep/2", mesh) == [9, 13]
    assert inside_node("ep", mesh, 4) == 2
    assert [inside_node("ep", mesh, size) for size in (0, 1, 2, 6, 8, 16)] == [0] * 6, "no node, or one that has all"


def test_replicated_axes_are_not_named():
    layout = Layout.of({"a": R, "b": Split(1)})
    assert layout == Layout((("b", Split(1)),)) and layout["a"] == R and str(layout) == "b:S1"
    assert layout.replace("b", R) == Layout() and str(Layout()) == "R"


def test_errors():
    mesh = {"a": 2, "b": 2}
    with pytest.raises(ValueError, match=r"dim 0 of size 6 cannot be split as a:S0/2.*not a multiple of 2 x 2"):
        Layout.of({"a": Split(0, 2)}).local_shape((6,), mesh)
    with pytest.raises(ValueError, match="overlap"):
        Layout.of({"a": Split(0), "b": Split(0)}).local_shape((8,), mesh)
    with pytest.raises(ValueError, match="falls inside a digit"):
        Layout.of({"a": Split(0)}).before(0, 12, {"a": 4}, 2)
    with pytest.raises(ValueError, match="position 5 of dim 0 falls inside a digit of R"):
        Layout().before(0, 12, mesh, 5)
    with pytest.raises(ValueError, match="position 24 does not divide dim 0 of size 12"):
        Layout().before(0, 12, mesh, 24)
    with pytest.raises(ValueError, match="no placement 'S': write R, S<dim>"):
        parse_placement("S")
    with pytest.raises(ValueError, match="3 blocks of 2 are fewer than 4 parts"):
        Layout.of({"a": Split(0, 1, 2)}).local_shape((6,), {"a": 4})
    assert not Layout.of({"a": Split(2)}).fits((4, 4), mesh)


def test_an_uneven_split_keeps_units_together():
    mesh = {"tp": 4, "dp": 2}
    heads = Layout.of({"tp": Split(0, 1, 64)})
    assert [heads.local_shape((15 * 64,), mesh, {"tp": i})[0] // 64 for i in range(4)] == [4, 4, 4, 3]
    both = heads.replace("dp", Split(0, 4, 64))
    heads_per_rank = [part.numel() // 64 for part in parts(both, torch.arange(15 * 64), mesh)]
    assert heads_per_rank == [2, 2, 2, 2, 2, 2, 2, 1]
