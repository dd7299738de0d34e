"""Up-sampling, sampling, pixel shuffle and reflected borders, forward and backward."""

import torch

from tutti.check.samples.sample import Draw, samples

aten = torch.ops.aten
F64 = torch.float64
NEAREST = {
    aten.upsample_nearest1d.default: aten.upsample_nearest1d_backward.default,
    aten.upsample_nearest2d.default: aten.upsample_nearest2d_backward.default,
    aten._upsample_nearest_exact2d.default: aten._upsample_nearest_exact2d_backward.default,
}


def images(d: Draw, dims: int = 2):
    return d.floats(d.pick([1, 2]), d.pick([1, 2, 4]), *(d.pick([2, 3, 4, 6]) for _ in range(dims)), dtype=F64)


@samples(*NEAREST)
def nearest(d: Draw, target):
    x = images(d, 1 if "1d" in str(target) else 2)
    if d.flag():
        return (x, [5] * (x.ndim - 2)), {}
    if d.flag():
        return (x, [int(n * 1.7) for n in x.shape[2:]], *[1.7] * (x.ndim - 2)), {}
    scales = [d.pick([1, 2, 3]) for _ in x.shape[2:]]
    return (x, [n * s for n, s in zip(x.shape[2:], scales, strict=True)], *map(float, scales)), {}


@samples(*NEAREST.values())
def nearest_backward(d: Draw, target):
    x = images(d, 1 if "1d" in str(target) else 2)
    size = [n * d.pick([1, 2, 3]) for n in x.shape[2:]]
    return (d.floats(*x.shape[:2], *size, dtype=F64), size, list(x.shape)), {}


@samples(aten.upsample_bilinear2d.default, aten.upsample_bicubic2d.default)
def smooth(d: Draw):
    x = images(d)
    return (x, [n * d.pick([1, 2, 3]) for n in x.shape[2:]], d.flag()), {}


@samples(aten.upsample_bilinear2d_backward.default, aten.upsample_bicubic2d_backward.default)
def smooth_backward(d: Draw):
    x = images(d)
    size = [n * d.pick([1, 2, 3]) for n in x.shape[2:]]
    return (d.floats(*x.shape[:2], *size, dtype=F64), size, list(x.shape), d.flag()), {}


def sampled(d: Draw):
    """Image, positions a little beyond its border too, how to sample it."""
    x = images(d)
    grid = d.floats(x.shape[0], d.pick([1, 2, 4]), d.pick([1, 2, 3]), 2, dtype=F64).clamp(-1.5, 1.5)
    return x, grid, d.pick([0, 1, 2]), d.pick([0, 1, 2]), d.flag()


@samples(aten.grid_sampler_2d.default)
def grid_sampler(d: Draw):
    return sampled(d), {}


@samples(aten.grid_sampler_2d_backward.default)
def grid_sampler_backward(d: Draw):
    args = sampled(d)
    return (d.floats(*aten.grid_sampler_2d(*args).shape, dtype=F64), *args, [d.flag(), True]), {}


def sampled_volume(d: Draw):
    x = images(d, 3)
    grid = d.floats(x.shape[0], d.pick([1, 2]), d.pick([1, 2, 4]), d.pick([1, 2, 3]), 3, dtype=F64).clamp(-1.5, 1.5)
    return x, grid, d.pick([0, 1]), d.pick([0, 1, 2]), d.flag()


@samples(aten.grid_sampler_3d.default)
def grid_sampler_3d(d: Draw):
    return sampled_volume(d), {}


@samples(aten.grid_sampler_3d_backward.default)
def grid_sampler_3d_backward(d: Draw):
    args = sampled_volume(d)
    return (d.floats(*aten.grid_sampler_3d(*args).shape, dtype=F64), *args, [d.flag(), True]), {}


@samples(aten.pixel_shuffle.default)
def pixel_shuffle(d: Draw):
    r, c = d.pick([1, 2, 3]), d.pick([1, 2, 4])
    return (d.floats(d.pick([1, 2]), c * r * r, d.pick([2, 3, 4]), d.pick([2, 3]), dtype=F64), r), {}


@samples(aten.pixel_unshuffle.default)
def pixel_unshuffle(d: Draw):
    r = d.pick([1, 2, 3])
    return (d.floats(d.pick([1, 2]), d.pick([1, 2, 4]), r * d.pick([2, 3, 4]), r * d.pick([2, 3]), dtype=F64), r), {}


PADS = {
    aten.reflection_pad1d.default: aten.reflection_pad1d_backward.default,
    aten.reflection_pad2d.default: aten.reflection_pad2d_backward.default,
    aten.replication_pad2d.default: aten.replication_pad2d_backward.default,
}


@samples(*PADS)
def border(d: Draw, target):
    x = images(d, 1 if "1d" in str(target) else 2)
    return (x, [d.pick([0, 0, 1]) for _ in range(2 * (x.ndim - 2))]), {}


@samples(*PADS.values())
def border_backward(d: Draw, target):
    x = images(d, 1 if "1d" in str(target) else 2)
    pads = [d.pick([0, 0, 1]) for _ in range(2 * (x.ndim - 2))]
    forward = next(f for f, b in PADS.items() if b == target)
    return (d.floats(*forward(x, pads).shape, dtype=F64), x, pads), {}
