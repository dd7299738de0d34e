"""Fused operators, forward and backward."""

import torch

from tutti.check.samples.sample import Draw, samples

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
