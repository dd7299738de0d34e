"""Convolutions, forward and backward, transposed, grouped, dilated; with and without bias."""

import torch

from tutti.check.samples.sample import Draw, samples

aten = torch.ops.aten
F64 = torch.float64


def drawn(d: Draw):
    """(input, weight, bias or None, arguments from the stride on)"""
    rank, groups, transposed = d.between(1, 2), d.pick([1, 1, 2]), d.flag()
    kernel = [d.pick([1, 2, 3, 5]) for _ in range(rank)]
    stride = [d.pick([1, 1, 2]) if k > 1 else d.pick([1, 2]) for k in kernel]
    dilation = [d.pick([1, 1, 2]) for _ in kernel]
    padding = [d.pick([0, (k - 1) * n // 2]) for k, n in zip(kernel, dilation, strict=True)]
    spread = [d.between(0, s - 1) if transposed else 0 for s in stride]
    size = [d.pick([8, 12]) if rank == 1 else d.pick([4, 6, 8]) for _ in kernel]
    channels, out_channels = groups * d.pick([1, 2, 4]), groups * d.pick([1, 2, 3])
    x = d.floats(d.pick([1, 2, 4]), channels, *size, dtype=F64)
    shape = (channels, out_channels // groups) if transposed else (out_channels, channels // groups)
    for i, n in enumerate(size):  # a kernel that is wider than what it looks at does not run
        if not transposed and n + 2 * padding[i] <= dilation[i] * (kernel[i] - 1):
            padding[i] = dilation[i] * (kernel[i] - 1)
    w = d.floats(*shape, *kernel, dtype=F64)
    bias = d.floats(out_channels, dtype=F64) if d.flag() else None
    return x, w, bias, (stride, padding, dilation, transposed, spread, groups)


@samples(aten.convolution.default)
def convolution(d: Draw):
    x, w, bias, rest = drawn(d)
    return (x, w, bias, *rest), {}


@samples(aten.convolution_backward.default)
def convolution_backward(d: Draw):
    x, w, bias, rest = drawn(d)
    y = aten.convolution(x, w, bias, *rest)
    mask = [d.flag(), True, bias is not None] if d.flag() else [True, d.flag(), bias is not None]
    sizes = [y.shape[1]] if bias is not None else None
    return (d.floats(*y.shape, dtype=F64), x, w, sizes, *rest, mask), {}
