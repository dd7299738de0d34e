"""Pooling, forward and backward."""

import torch

from tutti.check.samples.sample import Draw, samples

aten = torch.ops.aten
F64 = torch.float64


def drawn(d: Draw):
    """Input, kernel, stride, padding."""
    kernel = d.pick([1, 2, 3])
    stride, padding = d.pick([1, 2, kernel]), d.pick([0, (kernel - 1) // 2])
    shape = (d.pick([1, 2]), d.pick([1, 2]), d.pick([4, 6, 8]), d.pick([4, 6, 8]))
    x = torch.randperm(torch.Size(shape).numel(), generator=torch.Generator().manual_seed(d.between(0, 99)))
    return x.view(shape).to(F64), [kernel] * d.pick([1, 2]), [stride] * 2, [padding] * 2  # no ties


@samples(aten.max_pool2d_with_indices.default)
def max_pool(d: Draw):
    return (*drawn(d), [1, 1], d.flag()), {}


@samples(aten.max_pool2d_with_indices_backward.default)
def max_pool_backward(d: Draw):
    x, *options = drawn(d)
    options += [[1, 1], d.flag()]
    y, indices = aten.max_pool2d_with_indices(x, *options)
    return (d.floats(*y.shape, dtype=F64), x, *options, indices), {}


AVG = {
    aten.avg_pool2d.default: aten.avg_pool2d_backward.default,
    aten.avg_pool3d.default: aten.avg_pool3d_backward.default,
}


def averaged(d: Draw, dims: int):
    """Arguments of a mean over windows."""
    x, kernel, stride, padding = drawn(d)
    if dims == 3:
        x, kernel, stride, padding = x.unsqueeze(-1).repeat(1, 1, 1, 1, 4) + 1, kernel[:1] * 3, stride[:1], padding[:1]
    return x, kernel, stride, padding, False, d.flag(), d.pick([None, 5])


@samples(*AVG)
def avg_pool(d: Draw, target):
    return averaged(d, 3 if "3d" in str(target) else 2), {}


@samples(*AVG.values())
def avg_pool_backward(d: Draw, target):
    args = averaged(d, 3 if "3d" in str(target) else 2)
    forward = next(f for f, b in AVG.items() if b == target)
    return (d.floats(*forward(*args).shape, dtype=F64), *args), {}


@samples(aten.adaptive_max_pool2d.default)
def adaptive_max(d: Draw):
    return (drawn(d)[0], [d.pick([1, 2, 3, 4]), d.pick([2, 3])]), {}


@samples(aten.adaptive_max_pool2d_backward.default)
def adaptive_max_backward(d: Draw):
    x, *_ = drawn(d)
    y, indices = aten.adaptive_max_pool2d(x, [d.pick([1, 2, 4]), d.pick([2, 3])])
    return (d.floats(*y.shape, dtype=F64), x, indices), {}


@samples(aten._adaptive_avg_pool2d.default)
def adaptive(d: Draw):
    return (d.floats(d.pick([1, 2]), 2, d.pick([4, 6, 8]), 6, dtype=F64), [d.pick([1, 2, 3, 4]), d.pick([2, 3])]), {}


@samples(aten._adaptive_avg_pool2d_backward.default)
def adaptive_backward(d: Draw):
    x = d.floats(d.pick([1, 2]), 2, d.pick([4, 6, 8]), 6, dtype=F64)
    return (d.floats(*x.shape[:2], d.pick([1, 2, 3, 4]), d.pick([2, 3]), dtype=F64), x), {}
