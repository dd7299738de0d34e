"""Splits of calls whose arguments samples seldom draw together."""

from __future__ import annotations

from math import inf

import pytest
import torch

from tutti.check.machine import RuleReport, check
from tutti.check.samples.sample import Sample

aten = torch.ops.aten


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("order", [None, 2, 1, 0, 3, inf])
def test_a_norm_over_a_split_dim_has_its_order(order):
    """None is the norm of order 2."""
    report = RuleReport()
    check(Sample(aten.norm.ScalarOpt_dim, (numbers(4, 3), order, [0], False)), report)
    assert report.cases > 3 and not report.needless


@pytest.mark.parametrize(("padding", "counted"), [(1, True), (0, False), (0, True), (1, False)])
def test_planes_of_a_mean_pool_are_whole_only_where_borders_have_another_divisor(padding, counted):
    """Rows can be split unless the divisor is the number of elements within the image, and windows reach beyond it."""
    kernel = 3 if padding else 2
    sample = Sample(aten.avg_pool2d.default, (numbers(1, 2, 8, 4), [kernel] * 2, [2, 2], [padding] * 2, False, counted))
    report = RuleReport()
    check(sample, report)
    (line,) = report.lines
    assert ("h0!" in line) == (padding > 0 and not counted)
    assert report.cases > 3 and not report.needless


@pytest.mark.parametrize("scales", [(None, None), (2.0, 2.0), (2.0, 2.1), (2.1, 2.0)])
def test_rows_of_an_enlarged_image_are_blocks_only_at_the_scale_of_its_size(scales):
    """At scale 2.1 (eight of four rows too) the third row is the first one again: no part knows its rows alone."""
    report = RuleReport()
    check(Sample(aten.upsample_nearest2d.default, (numbers(2, 1, 4, 4), [8, 8], *scales)), report)
    (line,) = report.lines
    assert [f"{axis}0!" in line for axis in "hw"] == [scale == 2.1 for scale in scales]
    assert report.cases > 3


@pytest.mark.parametrize(("reduce", "summed"), [("sum", True), ("prod", False), ("mean", False), ("amax", False)])
def test_only_a_scatter_that_adds_takes_partial_sums(reduce, summed):
    index = torch.tensor([[0, 1, 1], [1, 0, 0]])
    report = RuleReport()
    check(Sample(aten.scatter_reduce.two, (numbers(2, 3), 0, index, numbers(2, 3), reduce)), report)
    (line,) = report.lines
    assert ("~" in line) == summed
    assert report.cases > 1


@pytest.mark.parametrize(("target", "options"), [
    (aten.adaptive_max_pool2d.default, ([4, 2],)), (aten._adaptive_avg_pool2d.default, ([4, 2],)),
    (aten.max_pool2d_with_indices.default, ([2, 2], [2, 2])), (aten.avg_pool2d.default, ([2, 2], [2, 2])),
], ids=str)  # fmt: skip
def test_an_image_without_a_batch_is_pooled_in_parts(target, options):
    report = RuleReport()
    check(Sample(target, (numbers(2, 8, 4), *options)), report)
    (line,) = report.lines
    assert "h*" in line and "w*" in line and report.cases > 3
