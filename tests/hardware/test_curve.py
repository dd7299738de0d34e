from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.hardware.curve import Curve, Grid

SIZES = (16, 64, 256)


def test_a_curve_is_straight_between_points_and_keeps_the_last_rate():
    curve = Curve(((0, 1.0), (10, 2.0), (30, 8.0)))
    assert curve.start == 1.0
    assert [curve.seconds(x) for x in (0, 5, 10, 20, 30, 60)] == pytest.approx([1.0, 1.5, 2.0, 5.0, 8.0, 16.0])


def test_measurements_that_fall_are_made_to_rise():
    assert Curve.through([(8, 1.0), (4, 3.0), (16, 5.0)]).points == ((0, 3.0), (4, 3.0), (8, 3.0), (16, 5.0))
    assert Curve.through([(4, 3.0)], start=0.0).points == ((0, 0.0), (4, 3.0))


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (((0, 1.0),), "two or more points of rising bytes"),
        (((1, 1.0), (2, 2.0)), "the first at 0"),
        (((0, 1.0), (0, 2.0)), "rising bytes"),
        (((0, 2.0), (1, 1.0)), "must not fall"),
    ],
)
def test_points_that_are_no_curve(points, message):
    with pytest.raises(ValueError, match=message):
        Curve(points)


@given(st.lists(st.tuples(st.integers(1, 1 << 30), st.floats(1e-6, 10)), min_size=1, unique_by=lambda p: p[0]),
       st.lists(st.floats(0, 1e10), min_size=2))  # fmt: skip
def test_a_curve_never_falls(points, counts):
    seconds = [Curve.through(points).seconds(x) for x in sorted(counts)]
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(seconds))


def test_a_grid_holds_power_laws_exactly():
    grid = Grid.of(SIZES, {(m, k, n): 1e-12 * m * k * n for m in SIZES for k in SIZES for n in SIZES})
    for shape in ((16, 64, 256), (17, 100, 200), (256, 256, 256), (1000, 50, 5000)):
        assert grid.at(*shape) == pytest.approx(1e-12 * shape[0] * shape[1] * shape[2])
    assert grid.at(1, 1, 1) == grid.at(16, 16, 16)


def test_shapes_that_were_not_measured_run_at_the_rate_of_the_nearest():
    grid = Grid.of(SIZES, {(16, 16, 16): 1e-6, (64, 64, 64): 32e-6})
    assert grid.at(256, 256, 256) == pytest.approx(32e-6 * 64)
    assert grid.at(16, 16, 64) == pytest.approx(4e-6)


def test_no_product_takes_longer_than_a_larger_one():
    measured = {(m, k, n): 5e-6 for m in SIZES for k in SIZES for n in SIZES} | {(64, 256, 64): 1e-6}
    grid = Grid.of(SIZES, measured)
    assert grid.at(16, 64, 16) == grid.at(64, 64, 64) == grid.at(64, 256, 64) == pytest.approx(1e-6)
    assert grid.at(256, 16, 16) == grid.at(16, 16, 256) == pytest.approx(5e-6)


def test_a_grid_of_the_wrong_size():
    with pytest.raises(ValueError, match=r"needs 2\^3 seconds, not 3"):
        Grid((1, 2), (1.0, 1.0, 1.0))
