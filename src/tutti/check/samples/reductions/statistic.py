"""Variances, norms, log-sum-exps and histograms."""

from math import inf

import torch

from tutti.check.samples.reductions.reduction import dims_of
from tutti.check.samples.sample import Draw, samples

aten = torch.ops.aten
F64 = torch.float64


@samples(aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction)
def variance(d: Draw):
    x = d.floats(*d.shape(1, 3, (2, 3, 4, 6)), dtype=d.dtype()) + 3
    x = torch.complex(x, x.flip(0)) if x.dtype == F64 and d.flag() else x
    return (x, d.pick([None, dims_of(d, x.ndim)])), {"correction": d.pick([None, 0, 1]), "keepdim": d.flag()}


@samples(aten.linalg_vector_norm.default)
def vector_norm(d: Draw):
    x = d.floats(*d.shape(1, 3), dtype=d.dtype())
    wider = {"dtype": F64} if d.flag() else {}
    return (x, d.pick([2, 1, 0, 3, inf, -inf]), d.pick([None, dims_of(d, x.ndim)]), d.flag()), wider


@samples(aten.norm.ScalarOpt_dim)
def norm_of_dims(d: Draw):
    x = d.floats(*d.shape(1, 3), dtype=d.dtype())
    return (x, d.pick([None, 2, 1, 0, 3, inf]), dims_of(d, x.ndim), d.flag()), {}


@samples(aten.norm.Scalar)
def norm(d: Draw):
    return (d.floats(*d.shape(0, 3)), d.pick([2, 1, 3])), {}


@samples(aten.logsumexp.default)
def logsumexp(d: Draw):
    """Rows of minus infinity too."""
    x = d.floats(*d.shape(1, 3), dtype=F64)
    return (torch.where(x > d.pick([-inf, 0.5]), x * 10, -inf), dims_of(d, x.ndim), d.flag()), {}


@samples(aten.histc.default)
def histc(d: Draw):
    return (d.floats(*d.shape(1, 2)), d.pick([1, 4, 10]), -1, 1.5), {}


@samples(aten._weight_norm_interface.default, aten._weight_norm_interface_backward.default)
def weight_norm(d: Draw, target):
    v = d.floats(*d.shape(2, 3), dtype=F64)
    dim = d.pick([0, v.ndim - 1])
    g = d.floats(*[n if i == dim else 1 for i, n in enumerate(v.shape)], dtype=F64)
    if target is aten._weight_norm_interface.default:
        return (v, g, dim), {}
    return (d.floats(*v.shape, dtype=F64), v, g, aten._weight_norm_interface(v, g, dim)[1], dim), {}
