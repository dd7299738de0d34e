"""Matrix products."""

import torch

from tutti.check.samples.sample import Draw, samples

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


@samples(aten.mv.default)
def mv(d: Draw):
    m, k = d.sizes(2)
    return (d.floats(m, k, dtype=torch.float64), d.floats(k, dtype=torch.float64)), {}


@samples(aten.dot.default)
def dot(d: Draw):
    k = d.size()
    return (d.floats(k, dtype=torch.float64), d.floats(k, dtype=torch.float64)), {}
