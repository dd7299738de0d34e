"""Slices and selections: equal blocks, every so-manieth row, and anything else."""

import torch

from tutti.check.samples.sample import Draw, samples

aten = torch.ops.aten
F64 = torch.float64


def sliced(d: Draw):
    """x, dim and what is asked of it: start, end, step."""
    shape = d.shape(1, 3)
    dim = d.between(0, len(shape) - 1)
    n = shape[dim]
    kind = d.pick(["block", "stride", "any"])
    if kind == "block":
        length = d.pick([m for m in (1, 2, 3, 4, 6) if n % m == 0])
        start = length * d.between(0, n // length - 1)
        rows = (start, start + length, 1)
    elif kind == "stride":
        step = d.pick([m for m in (1, 2, 3) if n % m == 0])
        rows = (d.between(0, step - 1) - n * d.flag(), 2**63 - 1, step)
    else:
        start = d.between(0, n - 1)
        rows = (start - n * d.flag(), d.between(start + 1, n + 2), d.between(1, 3))
    return d.floats(*shape, dtype=F64), dim - len(shape) * d.flag(), rows


@samples(aten.slice.Tensor)
def slice_(d: Draw):
    x, dim, rows = sliced(d)
    return (x, dim, *rows), {}


@samples(aten.slice_backward.default)
def slice_backward(d: Draw):
    x, dim, rows = sliced(d)
    return (torch.randn_like(aten.slice(x, dim, *rows)), list(x.shape), dim, *rows), {}


@samples(aten.slice_scatter.default)
def slice_scatter(d: Draw):
    x, dim, rows = sliced(d)
    return (x, torch.randn_like(aten.slice(x, dim, *rows)), dim, *rows), {}


@samples(aten.select.int, aten.select_backward.default, aten.select_scatter.default)
def select(d: Draw, target):
    shape = d.shape(1, 3)
    dim = d.between(-len(shape), len(shape) - 1)
    index = d.between(-shape[dim], shape[dim] - 1)
    x = d.floats(*shape, dtype=F64)
    if target is aten.select.int:
        return (x, dim, index), {}
    y = torch.randn_like(aten.select(x, dim, index))
    return ((y, list(shape)) if target is aten.select_backward.default else (x, y)) + (dim, index), {}
