"""Fused operators, forward and backward."""

import torch

from tutti.check.samples.sample import Draw, samples
from tutti.nn.activation import ACTIVATIONS

ops = torch.ops.tutti


def normed(d: Draw):
    """Input, weight or none, and (offset, wide)."""
    shape, dtype = d.shape(2, 4, (1, 2, 4, 6)), d.dtype()
    weight = d.floats(shape[-1], dtype=dtype) if d.flag() else None
    return d.floats(*shape, dtype=dtype), weight, (d.pick([0.0, 1.0]), d.flag())


@samples(ops.rms_norm.default)
def rms_norm(d: Draw):
    x, weight, options = normed(d)
    return (x, weight, 1e-5, *options), {}


@samples(ops.rms_norm_backward.default)
def rms_norm_backward(d: Draw):
    x, weight, options = normed(d)
    rstd = ops.rms_norm(x, weight, 1e-5, *options)[1]
    grad, added = (d.floats(*x.shape, dtype=x.dtype) for _ in range(2))
    return (grad, x, weight, rstd, *options, [True, d.flag()], *([added] if d.flag() else [])), {}


def turned(d: Draw):
    """Input, cosines and sines (any numbers); the angles may be the same for all of the batch and all heads."""
    batch, heads, length = d.sizes(3, (1, 2, 4))
    width, dtype = d.pick([2, 4, 6]), d.dtype()
    angles = (d.pick([1, batch]), d.pick([1, heads]), length, width)
    return d.floats(batch, heads, length, width, dtype=dtype), *(d.floats(*angles, dtype=dtype) for _ in range(2))


@samples(ops.rotary.default, ops.rotary_backward.default)
def rotary(d: Draw):
    return turned(d), {}


@samples(ops.glu.default)
def glu(d: Draw):
    shape, dtype = d.shape(1, 3), d.dtype()
    return (*(d.floats(*shape, dtype=dtype) for _ in range(2)), d.pick(list(ACTIVATIONS))), {}


@samples(ops.glu_backward.default)
def glu_backward(d: Draw):
    shape, dtype = d.shape(1, 3), d.dtype()
    return (*(d.floats(*shape, dtype=dtype) for _ in range(3)), d.pick(list(ACTIVATIONS))), {}


def classified(d: Draw):
    """Rows, weight, bias or none, and labels, of which some may be negative."""
    rows, width, classes = d.sizes(3, (1, 2, 4, 6))
    bias = d.floats(classes, dtype=torch.float64) if d.flag() else None
    hidden, weight = (d.floats(n, width, dtype=torch.float64) for n in (rows, classes))
    return hidden, weight, bias, d.integers(rows, low=-1, below=classes)


@samples(ops.linear_logsumexp.default)
def linear_logsumexp(d: Draw):
    return classified(d), {}


@samples(ops.linear_logsumexp_backward.default)
def linear_logsumexp_backward(d: Draw):
    operands = classified(d)
    grads = [d.floats(len(operands[0]), dtype=torch.float64) for _ in range(2)]
    return (*grads, *operands, ops.linear_logsumexp(*operands)[0], [True, d.flag(), d.flag()]), {}
