"""Matrix products."""

import torch

import tutti.nn.linear.ordered_mm  # noqa: F401  (registers the operator)
from tutti.check.samples.sample import Draw, samples
from tutti.nn.linear.scaled_mm import FORMATS, round_operand

aten = torch.ops.aten


@samples(aten.mm.default)
def mm(d: Draw):
    m, k, n = d.sizes(3)
    return (d.floats(m, k, dtype=torch.float64), d.floats(k, n, dtype=torch.float64)), {}


@samples(aten.bmm.default)
def bmm(d: Draw):
    b, m, k, n = d.sizes(4, (1, 2, 4, 6))
    return (d.floats(b, m, k, dtype=torch.float64), d.floats(b, k, n, dtype=torch.float64)), {}


@samples(aten.addmm.default)
def addmm(d: Draw):
    m, k, n = d.sizes(3)
    added = d.pick([(n,), (1, n), (m, n)])
    return tuple(d.floats(*shape, dtype=torch.float64) for shape in (added, (m, k), (k, n))), {}


@samples(torch.ops.tutti.ordered_mm.default)
def ordered_mm(d: Draw):
    m, k, n = d.sizes(3)
    added = d.floats(m, n, dtype=torch.float64) if d.flag() else None
    return (added, d.floats(m, k, dtype=torch.float64), d.floats(k, n, dtype=torch.float64), 0.5, 2.0), {}


@samples(torch.ops.tutti.scaled_mm.default)
def scaled_mm(d: Draw):
    (m, k, n), name = d.pick([(4, 256, 6), (2, 512, 4), (4, 6, 4)]), d.pick([*FORMATS])
    a, b = d.floats(m, k, dtype=torch.float32), d.floats(n, k, dtype=torch.float32)
    return (*round_operand(a, 1, name), *round_operand(b, 1, name), name, torch.float32), {}


@samples(torch.ops.tutti.round_operand.default)
def round_operand_(d: Draw):
    shape, dim = d.pick([(4, 256), (512, 2), (6, 4), (384, 6)]), d.pick([0, 1])
    return (d.floats(*shape, dtype=torch.float32), dim, d.pick([*FORMATS])), {}


@samples(aten.mv.default)
def mv(d: Draw):
    m, k = d.sizes(2)
    return (d.floats(m, k, dtype=torch.float64), d.floats(k, dtype=torch.float64)), {}


@samples(aten.dot.default, aten.vdot.default)
def dot(d: Draw):
    k = d.size()
    return (d.floats(k, dtype=torch.float64), d.floats(k, dtype=torch.float64)), {}


def doubles(d: Draw, *shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(d.floats(*shape, dtype=torch.float64) for shape in shapes)


@samples(aten.baddbmm.default, aten.addbmm.default)
def baddbmm(d: Draw, target):
    b, m, k, n = d.sizes(4, (1, 2, 4, 6))
    whole = (b, m, n) if target is aten.baddbmm.default else (m, n)
    added = tuple(1 if d.between(0, 3) == 3 else size for size in whole)
    return doubles(d, added, (b, m, k), (b, k, n)), {"beta": 2} if d.flag() else {}


@samples(aten.addmv.default)
def addmv(d: Draw):
    m, k = d.sizes(2)
    return doubles(d, d.pick([(m,), (1,)]), (m, k), (k,)), {"alpha": 2} if d.flag() else {}


@samples(aten.addr.default)
def addr(d: Draw):
    m, n = d.sizes(2)
    return doubles(d, d.pick([(m, n), (n,), (m, 1)]), (m,), (n,)), {}


@samples(aten.linear.default)
def linear(d: Draw):
    k, n = d.sizes(2)
    return doubles(d, (*d.shape(0, 2), k), (n, k), *([(n,)] if d.flag() else [])), {}


@samples(aten._trilinear.default)
def trilinear(d: Draw):
    """As `bilinear` calls it, and its two gradients."""
    b, n, i, j = d.sizes(4, (1, 2, 4, 6))
    calls = [
        (((b, i), (n, i, j), (b, j)), [1, 3], [0], [1, 2], [2, 3]),
        (((b, n), (n, i, j), (b, j)), [2, 3], [0], [1, 2], [1, 3]),
        (((b, n), (b, i), (b, j)), [2, 3], [1, 3], [1, 2], [0]),
    ]
    shapes, *dims = d.pick(calls)
    return (*doubles(d, *shapes), *dims), {}


@samples(aten.linalg_cross.default)
def cross(d: Draw):
    shape = list(d.shape(1, 2))
    at = d.between(0, len(shape))
    shape.insert(at, 3)
    other = [1 if i != at and d.between(0, 3) == 3 else n for i, n in enumerate(shape)]
    return doubles(d, tuple(shape), tuple(other)), {"dim": at - len(shape) * d.flag()}


@samples(aten._cdist_forward.default)
def cdist(d: Draw):
    batch, (n, m, k) = d.shape(0, 1), d.sizes(3, (1, 2, 4, 6))
    return (*doubles(d, (*batch, n, k), (*batch, m, k)), d.pick([1.0, 2.0, 3.0]), None), {}


@samples(aten._euclidean_dist.default)
def euclidean(d: Draw):
    """Points whose distances do not cancel: a square root magnifies the rounding of small distances."""
    n, m, k = d.sizes(3, (1, 2, 4, 6))
    x, y = doubles(d, (n, k), (m, k))
    return (x, y + 100), {}


@samples(aten._cdist_backward.default)
def cdist_backward(d: Draw):
    """Points with equal batches: the gradient of broadcast batches is that of their expansion."""
    batch, (n, m, k), order = d.shape(0, 1), d.sizes(3, (1, 2, 4, 6)), d.pick([1.0, 2.0, 3.0])
    x, y = doubles(d, (*batch, n, k), (*batch, m, k))
    return (*doubles(d, (*batch, n, m)), x, y, order, aten._cdist_forward(x, y, order, None)), {}


@samples(aten._pdist_forward.default)
def pdist(d: Draw):
    return (*doubles(d, (d.pick([2, 3, 4]), d.size())), d.pick([1.0, 2.0, 3.0])), {}


@samples(aten._pdist_backward.default)
def pdist_backward(d: Draw):
    (x,), order = doubles(d, (d.pick([2, 3, 4]), d.size())), d.pick([1.0, 2.0, 3.0])
    distances = aten._pdist_forward(x, order)
    return (*doubles(d, tuple(distances.shape)), x, order, distances), {}
