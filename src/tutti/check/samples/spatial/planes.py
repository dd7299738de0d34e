"""Operators on planes and volumes, forward and backward."""

import torch
import torch.nn.functional as F

from tutti.check.samples.sample import Draw, samples

aten = torch.ops.aten
F64 = torch.float64


def plane(d: Draw, dims: int, sizes=(4, 5, 6)) -> torch.Tensor:
    """Batch and channels, or channels alone."""
    return d.floats(*((d.pick([1, 2, 4]),) if d.flag() else ()), d.pick([1, 2, 4]), *d.sizes(dims, sizes), dtype=F64)


def batch(d: Draw, dims: int) -> torch.Tensor:
    return d.floats(d.pick([1, 2, 4]), d.pick([1, 2, 4]), *d.sizes(dims, (3, 4, 6)), dtype=F64)


SMOOTH = {
    aten.upsample_linear1d: (1, aten.upsample_linear1d_backward),
    aten.upsample_trilinear3d: (3, aten.upsample_trilinear3d_backward),
    aten._upsample_bilinear2d_aa: (2, aten._upsample_bilinear2d_aa_backward),
    aten._upsample_bicubic2d_aa: (2, aten._upsample_bicubic2d_aa_backward),
}
NEAREST = {
    aten.upsample_nearest3d: (3, aten.upsample_nearest3d_backward),
    aten._upsample_nearest_exact1d: (1, aten._upsample_nearest_exact1d_backward),
    aten._upsample_nearest_exact3d: (3, aten._upsample_nearest_exact3d_backward),
}
DIMS = {op.default: dims for op, (dims, _) in (SMOOTH | NEAREST).items()}
DIMS |= {gradient.default: dims for dims, gradient in (SMOOTH | NEAREST).values()}


@samples(*(op.default for op in SMOOTH))
def smooth(d: Draw, target):
    x = batch(d, DIMS[target])
    return (x, d.sizes(DIMS[target], (2, 5, 8)), d.flag()), {}


@samples(*(op.default for op in NEAREST))
def nearest(d: Draw, target):
    return (batch(d, DIMS[target]), d.sizes(DIMS[target], (2, 5, 8))), {}


@samples(*(gradient.default for _, gradient in (SMOOTH | NEAREST).values()))
def resized_gradient(d: Draw, target):
    x, size = batch(d, DIMS[target]), d.sizes(DIMS[target], (2, 5, 8))
    corners = (d.flag(),) if any(target is gradient.default for _, gradient in SMOOTH.values()) else ()
    return (d.floats(*x.shape[:2], *size, dtype=F64), size, list(x.shape), *corners), {}


@samples(aten._adaptive_avg_pool3d.default, aten.adaptive_max_pool3d.default)
def adaptive(d: Draw):
    return (plane(d, 3), d.sizes(3, (1, 2, 3))), {}


@samples(aten._adaptive_avg_pool3d_backward.default)
def adaptive_avg_backward(d: Draw):
    x = plane(d, 3)
    return (d.floats(*x.shape[:-3], *d.sizes(3, (1, 2)), dtype=F64), x), {}


@samples(aten.adaptive_max_pool3d_backward.default)
def adaptive_max_backward(d: Draw):
    x = plane(d, 3)
    y, index = aten.adaptive_max_pool3d(x, d.sizes(3, (1, 2)))
    return (d.floats(*y.shape, dtype=F64), x, index), {}


@samples(aten.max_pool3d_with_indices.default)
def max_pool3d(d: Draw):
    return (plane(d, 3), [2, 2, 2], [d.pick([1, 2])] * 3, [d.pick([0, 1])] * 3), {}


@samples(aten.max_pool3d_with_indices_backward.default)
def max_pool3d_backward(d: Draw):
    x = plane(d, 3)
    y, index = aten.max_pool3d_with_indices(x, [2, 2, 2])
    return (d.floats(*y.shape, dtype=F64), x, [2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False, index), {}


@samples(aten.max_unpool2d.default)
def max_unpool2d(d: Draw):
    x = plane(d, 2, (4, 6))
    y, index = F.max_pool2d(x, 2, return_indices=True)
    return (y, index, list(x.shape[-2:])), {}


@samples(aten.max_unpool3d.default)
def max_unpool3d(d: Draw):
    x = plane(d, 3, (4, 6))
    y, index = F.max_pool3d(x, 2, return_indices=True)
    return (y, index, list(x.shape[-3:]), [2, 2, 2], [0, 0, 0]), {}


PADS = {aten.replication_pad1d: 1, aten.replication_pad3d: 3, aten.reflection_pad3d: 3}


@samples(*(op.default for op in PADS))
def padded(d: Draw, target):
    dims = next(dims for op, dims in PADS.items() if op.default is target)
    return (plane(d, dims), d.sizes(2 * dims, (1, 2))), {}


@samples(aten.replication_pad1d_backward.default, aten.replication_pad3d_backward.default,
         aten.reflection_pad3d_backward.default)  # fmt: skip
def padded_gradient(d: Draw, target):
    dims = 1 if "1d" in str(target) else 3
    x, pads = plane(d, dims), [d.pick([1, 2])] * (2 * dims)
    after = [n + 2 * pads[0] for n in x.shape[-dims:]]
    return (d.floats(*x.shape[:-dims], *after, dtype=F64), x, pads), {}


def fraction(d: Draw, dims: int):
    x = plane(d, dims, (5, 6))
    draws = d.positive(x.shape[0] if x.ndim == dims + 2 else 1, x.shape[-dims - 1], dims) / 1.2
    return x, [2] * dims, [2] * dims, draws


FRACTIONAL = {
    aten.fractional_max_pool2d.default: (2, aten.fractional_max_pool2d_backward.default),
    aten.fractional_max_pool3d.default: (3, aten.fractional_max_pool3d_backward.default),
}


@samples(*FRACTIONAL)
def fractional(d: Draw, target):
    return fraction(d, FRACTIONAL[target][0]), {}


@samples(*(gradient for _, gradient in FRACTIONAL.values()))
def fractional_gradient(d: Draw, target):
    forward, dims = next((op, dims) for op, (dims, gradient) in FRACTIONAL.items() if gradient is target)
    x, kernel, size, draws = fraction(d, dims)
    y, index = forward(x, kernel, size, draws)
    return (d.floats(*y.shape, dtype=F64), x, kernel, size, index), {}


@samples(aten.affine_grid_generator.default)
def affine_grid(d: Draw):
    dims, n = d.pick([2, 3]), d.pick([1, 2, 4])
    return (d.floats(n, dims, dims + 1, dtype=F64), [n, 2, *d.sizes(dims, (2, 3))], d.flag()), {}
