"""Scans along a dim."""

import torch

from tutti.check.samples.sample import Draw, samples

aten = torch.ops.aten


@samples(aten.cumsum.default, aten.cumprod.default)
def cumsum(d: Draw):
    x = d.floats(*d.shape(1, 3), dtype=torch.float64)
    kwargs = {"dtype": torch.float32} if d.flag() else {}
    return (x, d.between(-x.ndim, x.ndim - 1)), kwargs


@samples(aten.logcumsumexp.default, aten.cummax.default, aten.cummin.default)
def logcumsumexp(d: Draw):
    x = d.floats(*d.shape(1, 3))
    return (x * 10, d.between(-x.ndim, x.ndim - 1)), {}
