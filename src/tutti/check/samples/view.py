"""Operators that only move elements."""

from math import prod

import torch

from tutti.check.samples.sample import Draw, samples

aten = torch.ops.aten


@samples(aten.reshape.default)
def reshape(d: Draw):
    """Two groupings of the same factors, or of one order of them and another."""
    factors = [d.pick([1, 2, 3, 4]) for _ in range(d.between(1, 4))]

    def shape(factors):
        dims, left = [], list(factors)
        while left:
            n = d.between(1, len(left))
            dims.append(prod(left[:n]))
            left = left[n:]
        return dims

    return (d.floats(*shape(factors)), shape(sorted(factors) if d.flag() else factors)), {}


@samples(aten.t.default)
def t(d: Draw):
    return (d.floats(*d.shape(1, 2)),), {}


@samples(aten.transpose.int)
def transpose(d: Draw):
    x = d.floats(*d.shape(2, 3))
    return (x, d.between(-x.ndim, x.ndim - 1), d.between(0, x.ndim - 1)), {}


@samples(aten.permute.default)
def permute(d: Draw):
    x = d.floats(*d.shape(1, 3))
    order = d.pick([[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, -1, 1], [-1, 1, 0]])
    return (x, order if x.ndim == 3 else list(range(x.ndim))[::-1]), {}


@samples(aten.unsqueeze.default)
def unsqueeze(d: Draw):
    x = d.floats(*d.shape(0, 2))
    return (x, d.between(-x.ndim - 1, x.ndim)), {}


@samples(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze(d: Draw, target):
    x = d.floats(*d.shape(1, 3, (1, 2, 6)))
    if target is aten.squeeze.default:
        return (x,), {}
    dim = d.between(-x.ndim, x.ndim - 1)
    return (x, dim if target is aten.squeeze.dim else sorted({dim % x.ndim, 0})), {}


@samples(aten.expand.default)
def expand(d: Draw):
    target = d.shape(1, 3)
    source = [1 if d.flag() else n for n in target][d.between(0, 1) :]
    return (d.floats(*source), list(target)), {}


@samples(aten.repeat.default)
def repeat(d: Draw):
    x = d.floats(*d.shape(1, 2, (1, 2, 4, 6)))
    return (x, [d.pick([1, 2, 4]) for _ in range(x.ndim + d.between(0, 1))]), {}


@samples(aten.split.Tensor, aten.unsafe_split.Tensor)
def split(d: Draw):
    shape = d.shape(1, 3)
    dim = d.between(-len(shape), len(shape) - 1)
    return (d.floats(*shape), d.pick([n for n in (1, 2, 3, 4, 6) if n <= shape[dim]]), dim), {}


@samples(aten.split_with_sizes.default, aten.unsafe_split_with_sizes.default)
def split_with_sizes(d: Draw):
    sizes = [d.size((2, 4, 6))] * d.between(1, 3) + ([d.size()] if d.flag() else [])
    shape = [d.size(), d.size()]
    dim = d.between(-2, 1)
    shape[dim] = sum(sizes)
    return (d.floats(*shape), sizes, dim), {}


@samples(aten.cat.default)
def cat(d: Draw):
    shape, dim = list(d.shape(1, 3)), d.between(-1, 0)
    parts = []
    for _ in range(d.between(1, 3)):
        parts.append(d.floats(*shape, dtype=torch.float64))
        shape[dim] = d.size() if d.between(0, 2) == 2 else shape[dim]
    return (parts, dim), {}


@samples(aten.stack.default)
def stack(d: Draw):
    shape = d.shape(0, 2)
    return ([d.floats(*shape, dtype=torch.float64) for _ in range(d.between(1, 4))], d.between(-1, len(shape))), {}


@samples(aten.unbind.int)
def unbind(d: Draw):
    x = d.floats(*d.shape(1, 3, (1, 2, 4)))
    return (x, d.between(-x.ndim, x.ndim - 1)), {}


@samples(aten.flip.default)
def flip(d: Draw):
    x = d.floats(*d.shape(1, 3))
    return (x, d.pick([[0], [-1], list(range(x.ndim))])), {}


@samples(aten.rot90.default)
def rot90(d: Draw):
    return (d.floats(*d.shape(3, 3)), d.between(-1, 3), d.pick([[0, 1], [1, 2], [-1, 0]])), {}


@samples(aten.constant_pad_nd.default)
def pad(d: Draw):
    """Rows before and behind; negative numbers cut, of a dim that is long enough."""
    shape = d.shape(1, 3)
    pads = [d.between(-(n // 2), 3) if d.flag() else 0 for n in reversed(shape) for _ in range(2)]
    return (d.floats(*shape), pads[: 2 * d.between(1, len(shape))], d.pick([0, 0.0, 1.5])), {}


def square(d: Draw):
    shape = d.shape(2, 3)
    return d.floats(*shape, dtype=torch.float64), d.between(1 - min(shape), min(shape) - 1)


@samples(aten.diagonal.default, aten.diagonal_backward.default, aten.diagonal_scatter.default)
def diagonal(d: Draw, target):
    x, offset = square(d)
    dims = d.pick([(0, 1), (-1, 0), (x.ndim - 2, x.ndim - 1)])
    y = torch.randn_like(aten.diagonal(x, offset, *dims))
    if target is aten.diagonal.default:
        return (x, offset, *dims), {}
    return ((y, list(x.shape)) if target is aten.diagonal_backward.default else (x, y)) + (offset, *dims), {}


@samples(aten.diag_embed.default)
def diag_embed(d: Draw):
    return (d.floats(*d.shape(1, 2)), d.between(-2, 2), *d.pick([(), (0, 1), (-1, 0)])), {}


@samples(aten.view_as_real.default)
def view_as_real(d: Draw):
    return (torch.view_as_complex(d.floats(*d.shape(1, 2), 2)),), {}


@samples(aten.view_as_complex.default)
def view_as_complex(d: Draw):
    return (d.floats(*d.shape(0, 2), 2),), {}


@samples(aten.channel_shuffle.default)
def channel_shuffle(d: Draw):
    groups = d.pick([1, 2, 4])
    return (d.floats(d.size(), groups * d.pick([1, 2, 4]), *d.shape(1, 2)), groups), {}
