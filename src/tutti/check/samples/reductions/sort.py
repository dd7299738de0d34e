"""Operators that compare entries along a dim. Numbers are distinct where which of equal ones is found is undefined."""

import torch

from tutti.check.samples.sample import Draw, samples

aten = torch.ops.aten


@samples(aten.max.dim, aten.min.dim)
def extreme(d: Draw):
    """With ties, of which the first counts."""
    x = d.floats(*d.shape(1, 3))
    return (x.round() if d.flag() else x, d.between(-x.ndim, x.ndim - 1), d.flag()), {}


@samples(aten.argmax.default, aten.argmin.default)
def extreme_of_all(d: Draw):
    """With ties, of which the first counts; of a dim or of all."""
    x = d.floats(*d.shape(1, 3))
    return (x.round() if d.flag() else x, d.pick([None, 0, -1]), d.flag()), {}


@samples(aten.median.default, aten.nanmedian.default)
def median_of_all(d: Draw):
    return (d.floats(*d.shape(1, 3)),), {}


@samples(aten.median.dim, aten.nanmedian.dim, aten.mode.default)
def median(d: Draw):
    x = d.floats(*d.shape(1, 3))
    return (x, d.between(-x.ndim, x.ndim - 1), d.flag()), {}


@samples(aten.kthvalue.default)
def kthvalue(d: Draw):
    x = d.floats(*d.shape(1, 3))
    dim = d.between(-x.ndim, x.ndim - 1)
    return (x, d.between(1, x.shape[dim]), dim, d.flag()), {}


@samples(aten.topk.default)
def topk(d: Draw):
    x = d.floats(*d.shape(1, 3))
    dim = d.between(-x.ndim, x.ndim - 1)
    return (x, d.between(1, x.shape[dim]), dim, d.flag()), {}


@samples(aten.sort.default)
def sort(d: Draw):
    x = d.floats(*d.shape(1, 3))
    return (x, d.between(-x.ndim, x.ndim - 1), d.flag()), {}


@samples(aten.sort.stable)
def stable_sort(d: Draw):
    x = d.floats(*d.shape(1, 3)).round()
    return (x,), {"stable": True, "dim": d.between(-x.ndim, x.ndim - 1), "descending": d.flag()}


@samples(aten.searchsorted.Tensor)
def searchsorted(d: Draw):
    x = d.floats(*d.shape(1, 3), dtype=torch.float64)
    rows = x.shape[:-1] if d.flag() else ()
    return (d.floats(*rows, d.size(), dtype=torch.float64).sort(-1)[0], x), {"right": d.flag()}


@samples(aten.bucketize.Tensor)
def bucketize(d: Draw):
    return (d.floats(*d.shape(0, 3)), torch.linspace(-1, 1, d.size())), {}


@samples(aten.isin.Tensor_Tensor)
def isin(d: Draw):
    return (d.integers(*d.shape(0, 3), below=6), d.integers(*d.shape(1, 2, (1, 2)), below=6)), {"invert": d.flag()}
