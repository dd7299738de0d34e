"""Rolls of one dim, of several, of one twice, and of the flattened tensor."""

import torch

from tutti.check.samples.sample import Draw, samples

aten = torch.ops.aten


@samples(aten.roll.default)
def roll(d: Draw):
    x = d.floats(*d.shape(1, 3))
    dims = d.pick([[], [0], [-1], [0, -1]])
    return (x, [d.between(-15, 15) for _ in dims or [0]], dims), {}
