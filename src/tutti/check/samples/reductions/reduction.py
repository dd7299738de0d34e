"""Reductions of all dims, of one and of several."""

from math import nan

import torch

from tutti.check.samples.sample import Draw, samples

aten = torch.ops.aten
F64 = torch.float64


def dims_of(d: Draw, rank: int) -> list[int]:
    return d.pick([[0], [-1], list(range(rank))])


@samples(aten.sum.default, aten.mean.default, aten.max.default, aten.min.default, aten.prod.default)
def all_dims(d: Draw):
    return (d.floats(*d.shape(0, 3), dtype=F64),), {}


@samples(aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default)
def some_dims(d: Draw):
    x = d.floats(*d.shape(1, 3), dtype=F64)
    return (x, dims_of(d, x.ndim), *([] if d.flag() else [d.flag()])), {}


@samples(aten.nansum.default)
def nansum(d: Draw):
    x = d.floats(*d.shape(1, 3), dtype=F64)
    return (x.masked_fill(x > d.pick([0.0, 1.0]), nan), dims_of(d, x.ndim)), {}


@samples(aten.prod.dim_int)
def prod(d: Draw):
    x = d.floats(*d.shape(1, 3), dtype=F64)
    return (x, d.between(-x.ndim, x.ndim - 1), d.flag()), {}


@samples(aten.count_nonzero.default, aten.any.default, aten.all.default)
def truths(d: Draw):
    return (d.integers(*d.shape(0, 3), below=3).to(d.pick([torch.bool, torch.int64, torch.uint8])),), {}


@samples(aten.count_nonzero.dim_IntList, aten.any.dims, aten.all.dims)
def truths_of_dims(d: Draw, target):
    x = d.integers(*d.shape(1, 3), below=3)
    keep = [] if target is aten.count_nonzero.dim_IntList else [d.flag()]
    return (x, dims_of(d, x.ndim), *keep), {}


@samples(aten.any.dim, aten.all.dim)
def truths_of_dim(d: Draw):
    x = d.booleans(*d.shape(1, 3))
    return (x, d.between(-x.ndim, x.ndim - 1), d.flag()), {}


@samples(aten.aminmax.default)
def aminmax(d: Draw):
    x = d.floats(*d.shape(1, 3), dtype=F64)
    return (x,), {"dim": d.pick([None, 0, -1]), "keepdim": d.flag()}
