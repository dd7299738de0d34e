"""Normalisations, forward and backward."""

import torch

from tutti.check.samples.sample import Draw, samples

aten = torch.ops.aten


def maybe(d: Draw, n: int, dtype: torch.dtype):
    return d.floats(n, dtype=dtype) if d.flag() else None


@samples(aten.native_layer_norm.default)
def layer_norm(d: Draw):
    shape, over, dtype = d.shape(2, 3), d.between(1, 2), d.dtype()
    weights = [d.floats(*shape[-over:], dtype=dtype) if d.flag() else None for _ in range(2)]
    return (d.floats(*shape, dtype=dtype), list(shape[-over:]), *weights, 1e-5), {}


@samples(aten.native_layer_norm_backward.default)
def layer_norm_backward(d: Draw):
    shape, over, dtype = d.shape(2, 3), 1, d.dtype()
    x, weights = d.floats(*shape, dtype=dtype), [d.floats(*shape[-over:], dtype=dtype) for _ in range(2)]
    _, mean, deviation = aten.native_layer_norm(x, shape[-over:], *weights, 1e-5)
    mask = [d.flag(), d.flag(), True]
    return (d.floats(*shape, dtype=dtype), x, list(shape[-over:]), mean, deviation, *weights, mask), {}


def images(d: Draw, channels: int):
    """(batch, channels, 0 to 2 further dims)"""
    more = [d.pick([2, 4, 6]) for _ in range(d.between(0, 2))]
    return d.floats(d.pick([2, 4, 6]), channels, *more, dtype=d.dtype()) + 2


@samples(aten._native_batch_norm_legit_functional.default)
def batch_norm(d: Draw):
    channels = d.pick([1, 2, 4])
    x = images(d, channels)
    running = d.floats(channels, dtype=x.dtype), d.positive(channels, dtype=x.dtype)
    return (x, *(maybe(d, channels, x.dtype) for _ in range(2)), *running, d.flag(), 0.1, 1e-5), {}


@samples(aten._native_batch_norm_legit_no_training.default)
def frozen_batch_norm(d: Draw):
    channels = d.pick([1, 2, 4])
    x = images(d, channels)
    running = d.floats(channels, dtype=x.dtype), d.positive(channels, dtype=x.dtype)
    return (x, *(maybe(d, channels, x.dtype) for _ in range(2)), *running, 0.1, 1e-5), {}


@samples(aten._native_batch_norm_legit.no_stats)
def batch_norm_alone(d: Draw):
    channels = d.pick([1, 2, 4])
    x = images(d, channels)
    return (x, *(maybe(d, channels, x.dtype) for _ in range(2)), True, 0.1, 1e-5), {}


@samples(aten.native_batch_norm_backward.default)
def batch_norm_backward(d: Draw):
    channels, training = d.pick([1, 2, 4]), d.flag()
    x = images(d, channels)
    weight = maybe(d, channels, x.dtype)
    running = d.floats(channels, dtype=x.dtype), d.positive(channels, dtype=x.dtype)
    _, mean, deviation, _, _ = aten._native_batch_norm_legit_functional(x, weight, None, *running, training, 0.1, 1e-5)
    affine = weight is not None
    mask = [d.flag() or not affine, affine, affine]
    return (d.floats(*x.shape, dtype=x.dtype), x, weight, *running, mean, deviation, training, 1e-5, mask), {}


def grouped(d: Draw):
    """Input, weight, (N, C, HW, groups)"""
    groups = d.pick([1, 2, 4])
    channels = groups * d.pick([1, 2, 3])
    x = images(d, channels)
    return x, maybe(d, channels, x.dtype), (x.shape[0], channels, x[0, 0].numel(), groups)


@samples(aten.native_group_norm.default)
def group_norm(d: Draw):
    x, weight, sizes = grouped(d)
    return (x, weight, None if weight is None else weight + 1, *sizes, 1e-5), {}


@samples(aten.native_group_norm_backward.default)
def group_norm_backward(d: Draw):
    x, weight, sizes = grouped(d)
    _, mean, deviation = aten.native_group_norm(x, weight, None, *sizes, 1e-5)
    affine = weight is not None
    mask = [d.flag() or not affine, affine, affine]
    return (d.floats(*x.shape, dtype=x.dtype), x, mean, deviation, weight, *sizes, mask), {}
