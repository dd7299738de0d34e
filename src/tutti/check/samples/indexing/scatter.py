"""Writing by positions: where entries replace each other, no position occurs twice."""

from math import prod

import torch

from tutti.check.samples.indexing.index import indices_of, positions, shorter
from tutti.check.samples.sample import Draw, samples

aten = torch.ops.aten
F64 = torch.float64


def distinct(d: Draw, shape: tuple[int, ...], dim: int, rows: int) -> torch.Tensor:
    """Row numbers that differ along `dim`, at most `rows` of them."""
    x = d.floats(*(rows if i == dim else n for i, n in enumerate(shape)))
    return x.argsort(dim).narrow(dim, 0, min(rows, shape[dim]))


def drawn(d: Draw, unique: bool):
    """x, dim, index, source of a scatter."""
    shape = d.shape(1, 3)
    dim = d.between(0, len(shape) - 1)
    at = shorter(d, shape, dim)
    index = distinct(d, at, dim, shape[dim]) if unique else positions(d, at, shape[dim])
    source = tuple(n + (d.between(0, 4) == 4) for n in index.shape)
    return d.floats(*shape, dtype=F64), dim - len(shape) * d.flag(), index, d.floats(*source, dtype=F64)


@samples(aten.scatter.src)
def scatter(d: Draw):
    return drawn(d, unique=True), {}


@samples(aten.scatter.value)
def scatter_value(d: Draw):
    return (*drawn(d, unique=False)[:3], d.pick([0, 1.5])), {}


@samples(aten.scatter_add.default)
def scatter_add(d: Draw):
    return drawn(d, unique=False), {}


@samples(aten.scatter_reduce.two)
def scatter_reduce(d: Draw):
    reduce = d.pick(["sum", "prod", "mean", "amax", "amin"])
    return (*drawn(d, unique=False), reduce), {} if d.flag() else {"include_self": d.flag()}


def rows_of(d: Draw, unique: bool):
    """x, dim and numbers of its rows."""
    shape = d.shape(1, 3)
    dim = d.between(0, len(shape) - 1)
    index = distinct(d, (d.size(),), 0, shape[dim]) if unique else positions(d, (d.size(),), shape[dim])
    return d.floats(*shape, dtype=F64), dim, index


@samples(aten.scatter.reduce)
def scatter_combined(d: Draw):
    return drawn(d, unique=False), {"reduce": d.pick(["add", "multiply"])}


@samples(aten.scatter.value_reduce)
def scatter_value_combined(d: Draw):
    return (*drawn(d, unique=False)[:3], d.pick([0, 1.5])), {"reduce": d.pick(["add", "multiply"])}


def source_of(d: Draw, x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    return d.floats(*x.shape[:dim], len(index), *x.shape[dim + 1 :], dtype=F64)


@samples(aten.index_add.default)
def index_add(d: Draw):
    x, dim, index = rows_of(d, unique=False)
    return (x, dim, index, source_of(d, x, dim, index)), {"alpha": 2} if d.flag() else {}


@samples(aten.index_copy.default)
def index_copy(d: Draw):
    x, dim, index = rows_of(d, unique=True)
    return (x, dim, index, source_of(d, x, dim, index)), {}


@samples(aten.index_fill.int_Scalar)
def index_fill(d: Draw):
    return (*rows_of(d, unique=False), d.pick([0, 1.5])), {}


@samples(aten.index_fill.int_Tensor)
def index_fill_tensor(d: Draw):
    return (*rows_of(d, unique=False), d.floats(dtype=F64)), {}


@samples(aten.index_put.default)
def index_put(d: Draw):
    """By several index tensors; one without repetitions where entries replace; or a mask and one value."""
    shape = d.shape(1, 3)
    x, kind = d.floats(*shape, dtype=F64), d.pick(["add", "replace", "mask"])
    if kind == "mask":
        first = d.between(0, len(shape) - 1)
        mask = d.booleans(*shape[first : d.between(first + 1, len(shape))])
        return (x, [*[None] * first, mask], d.floats(*d.pick([(), (1,)]), dtype=F64), d.flag()), {}
    if kind == "add":
        indices = indices_of(d, shape)
    else:
        dim = d.between(0, len(shape) - 1)
        rows = distinct(d, (d.size(),), 0, shape[dim])
        indices = [*[None] * dim, rows - shape[dim] * d.flag()]
    read_shape = aten.index(x, indices).shape
    values = tuple(1 if d.between(0, 4) == 4 else n for n in read_shape)[d.between(0, 1) if prod(read_shape) else 0 :]
    return (x, indices, d.floats(*values, dtype=F64), kind == "add"), {}


@samples(aten.put.default)
def put(d: Draw):
    shape, adds = d.shape(1, 2), d.flag()
    n, at = prod(shape), d.shape(1, 2)
    index = positions(d, at, n) if adds else distinct(d, (prod(at),), 0, n)
    return (d.floats(*shape, dtype=F64), index, d.floats(*index.shape, dtype=F64), adds), {}


def masked(d: Draw) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """A tensor, a mask of its entries or of its rows, and the shape of a source."""
    shape = d.shape(2, 3)
    mask = d.booleans(*shape[:-1], 1) if d.flag() else d.booleans(*shape)
    return d.floats(*shape, dtype=F64), mask, d.pick([shape, (prod(shape[:-1]), shape[-1]), (prod(shape),)])


@samples(aten.masked_scatter.default)
def masked_scatter(d: Draw):
    x, mask, source = masked(d)
    return (x, mask, d.floats(*source, dtype=F64)), {}


@samples(aten.masked_scatter_backward.default)
def masked_scatter_backward(d: Draw):
    x, mask, source = masked(d)
    return (x, mask, list(source)), {}


@samples(aten.index_reduce.default)
def index_reduce(d: Draw):
    x, dim, index = rows_of(d, unique=False)
    return (x, dim, index, source_of(d, x, dim, index), d.pick(["prod", "mean", "amax", "amin"])), {
        "include_self": d.flag()
    }
