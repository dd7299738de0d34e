"""Operators that make tensors out of numbers."""

from math import prod

import torch

import tutti.nn.random  # noqa: F401  (registers tutti::uniform)
from tutti.check.samples.sample import Draw, samples

aten = torch.ops.aten


@samples(aten.full.default)
def full(d: Draw):
    return (list(d.shape(0, 3)), d.pick([0.5, 2])), {}


@samples(aten.zeros.default, aten.ones.default, aten.empty.memory_format)
def zeros(d: Draw):
    return (list(d.shape(0, 3)),), {"dtype": d.pick([torch.float32, torch.int64, torch.bool])}


@samples(aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default)
def new_zeros(d: Draw):
    return (d.floats(*d.shape(0, 2)), list(d.shape(0, 3))), {}


@samples(aten.new_full.default)
def new_full(d: Draw):
    return (d.floats(*d.shape(0, 2)), list(d.shape(0, 3)), 1.5), {}


@samples(aten.new_empty_strided.default)
def new_empty_strided(d: Draw):
    x = d.floats(*d.shape(1, 3))
    like = torch.empty(d.shape(1, 3)).transpose(0, -1)
    return (x, list(like.shape), list(like.stride())), {}


@samples(aten.scalar_tensor.default)
def scalar_tensor(d: Draw):
    return (1.5,), {}


@samples(aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(d: Draw, target):
    first, last, step = d.between(-2, 2), d.between(3, 9), d.pick([1, 2])
    return {aten.arange.default: (last,), aten.arange.start: (first, last)}.get(target, (first, last, step)), {}


@samples(aten.linspace.default)
def linspace(d: Draw):
    return (-1, 2, d.size()), {}


@samples(aten.eye.default)
def eye(d: Draw):
    return (d.size(),), {}


@samples(aten.eye.m, aten.tril_indices.default, aten.triu_indices.default)
def indices(d: Draw):
    return (d.size(), d.size()), {}


@samples(aten.tril.default, aten.triu.default)
def triangle(d: Draw):
    x = d.floats(*d.shape(2, 3))
    return (x, d.between(-5, 5)) if d.flag() else (x,), {}


@samples(torch.ops.tutti.uniform.default)
def uniform(d: Draw):
    shape = list(d.shape(0, 3))
    numbers = torch.tensor(d.between(0, 9)), torch.tensor(d.between(1, 9))
    where: tuple = ([torch.Size(shape).numel()], [1], 0)
    if shape and d.flag():  # a part of a tensor with dims of twice the size
        where = shape, [prod(2 * n for n in shape[i + 1 :]) for i in range(len(shape))], d.between(0, 3)
    return (*numbers, d.between(0, 3), shape, *where), {"device": torch.device("cpu")}
