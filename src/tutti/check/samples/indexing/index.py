"""Reading by positions."""

import torch

from tutti.check.samples.sample import Draw, samples

aten = torch.ops.aten


def positions(d: Draw, shape: tuple[int, ...], rows: int, negative: bool = False) -> torch.Tensor:
    return d.integers(*shape, low=-rows if negative and d.flag() else 0, below=rows)


def shorter(d: Draw, shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    """The shape of an index along `dim`: any size there, elsewhere as much as x has or, now and then, less."""
    return tuple(d.size() if i == dim else max(1, n - (d.between(0, 4) == 4)) for i, n in enumerate(shape))


@samples(aten.gather.default)
def gather(d: Draw):
    shape = d.shape(1, 3)
    dim = d.between(0, len(shape) - 1)
    at = positions(d, shorter(d, shape, dim), shape[dim])
    return (d.floats(*shape), dim - len(shape) * d.flag(), at), {}


@samples(aten.index_select.default)
def index_select(d: Draw):
    shape = d.shape(1, 3)
    dim = d.between(0, len(shape) - 1)
    return (d.floats(*shape), dim - len(shape) * d.flag(), positions(d, d.shape(0, 1), shape[dim])), {}


@samples(aten.take.default)
def take(d: Draw):
    shape = d.shape(1, 2)
    return (d.floats(*shape), positions(d, d.shape(1, 2), torch.Size(shape).numel())), {}


def indices_of(d: Draw, shape: tuple[int, ...]) -> list[torch.Tensor | None]:
    """Index tensors for some of the dims, of shapes that broadcast."""
    common = d.shape(1, 2)
    chosen = [d.flag() for _ in shape]
    chosen[d.between(0, len(shape) - 1)] = True
    shapes = [tuple(1 if d.between(0, 3) == 3 else n for n in common[d.between(0, len(common) - 1) :]) for _ in shape]
    return [
        positions(d, at, n, negative=True) if with_index else None
        for at, n, with_index in zip(shapes, shape, chosen, strict=True)
    ]


@samples(aten.index.Tensor)
def index(d: Draw):
    shape = d.shape(1, 3)
    return (d.floats(*shape), indices_of(d, shape)), {}
