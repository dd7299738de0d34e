"""Fourier transforms, of real and complex numbers."""

import torch

from tutti.check.samples.sample import Draw, samples

aten = torch.ops.aten
F64 = torch.float64


def dims_of(d: Draw, rank: int) -> list[int]:
    return d.pick([[rank - 1], [0], list(range(rank))])


@samples(aten._fft_r2c.default)
def real(d: Draw):
    x = d.floats(*d.shape(1, 3), dtype=F64)
    return (x, dims_of(d, x.ndim), d.between(0, 2), d.flag()), {}


@samples(aten._fft_c2c.default)
def complex_(d: Draw):
    x = torch.view_as_complex(d.floats(*d.shape(1, 3), 2, dtype=F64))
    return (x, dims_of(d, x.ndim), d.between(0, 2), d.flag()), {}


@samples(aten._fft_c2r.default)
def back_to_real(d: Draw):
    n = d.size((1, 2, 4, 6))
    x = torch.view_as_complex(d.floats(*d.shape(0, 2), n // 2 + 1, 2, dtype=F64))
    return (x, [x.ndim - 1], d.between(0, 2), n), {}
