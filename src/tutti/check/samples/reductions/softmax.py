"""Softmax and log-softmax."""

from math import inf

import torch

from tutti.check.samples.sample import Draw, samples

aten = torch.ops.aten


@samples(aten._softmax.default, aten._log_softmax.default)
def softmax(d: Draw):
    x = d.floats(*d.shape(1, 3), dtype=d.dtype())
    return (x * 5, d.between(-x.ndim, x.ndim - 1), False), {}


@samples(aten._safe_softmax.default)
def safe_softmax(d: Draw):
    """Rows that are masked in part, or all over."""
    x = d.floats(*d.shape(1, 3), dtype=d.dtype())
    return (torch.where(x > d.pick([-inf, 0.5]), x, -inf), d.between(-x.ndim, x.ndim - 1)), {}


@samples(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def softmax_backward(d: Draw, target):
    x = d.floats(*d.shape(1, 3), dtype=d.dtype())
    dim = d.between(-x.ndim, x.ndim - 1)
    output = x.softmax(dim) if target is aten._softmax_backward_data.default else x.log_softmax(dim)
    return (d.floats(*x.shape, dtype=x.dtype), output, dim, x.dtype), {}
