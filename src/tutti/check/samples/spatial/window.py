"""Windows over dims: side by side, overlapping, or with gaps."""

import torch

from tutti.check.samples.sample import Draw, samples

aten = torch.ops.aten


@samples(aten.unfold.default, aten.unfold_backward.default)
def unfold(d: Draw, target):
    shape = d.shape(1, 2)
    dim = d.between(0, len(shape) - 1)
    size = d.pick([n for n in (1, 2, 3, 4) if n <= shape[dim]])
    step = d.pick([size, size, 1, 3])
    x = d.floats(*shape)
    if target is aten.unfold.default:
        return (x, dim - x.ndim * d.flag(), size, step), {}
    return (torch.randn_like(aten.unfold(x, dim, size, step)), list(shape), dim, size, step), {}


@samples(aten.im2col.default, aten.col2im.default)
def im2col(d: Draw, target):
    shape = [*d.pick([(), (2,), (4,)]), d.pick([1, 2, 4]), 4, 6]
    options = [d.pick([1, 2]), 2], [1, 1], [d.between(0, 1), 0], [1, d.pick([1, 2])]
    x = d.floats(*shape)
    if target is aten.im2col.default:
        return (x, *options), {}
    return (torch.randn_like(aten.im2col(x, *options)), [4, 6], *options), {}
