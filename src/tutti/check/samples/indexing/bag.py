"""Embedding bags with offsets of all kinds: empty bags, padding, weights, a last offset."""

import torch

from tutti.check.samples.sample import Draw, samples

aten = torch.ops.aten
F64 = torch.float64
SUM, MEAN, MAX = 0, 1, 2
INTEGERS = (torch.int64, torch.int32)


def drawn(d: Draw):
    """Table, indices, offsets, then scale, mode, sparse, weights, whether there is a last offset, padding."""
    rows, entries, bags = d.size((2, 4, 6, 12)), d.size((2, 4, 6, 12)), d.size((1, 2, 4))
    mode = d.pick([SUM, SUM, MEAN, MAX])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), d.integers(bags - 1, below=entries).sort()[0]])
    last = d.between(0, 4) == 4
    if last:
        offsets = torch.cat([offsets, torch.tensor([entries])])
    weights = d.floats(entries, dtype=F64) if mode == SUM and d.flag() else None
    table = d.floats(rows, d.size((2, 4)), dtype=F64)
    indices = d.integers(entries, below=rows).to(d.pick(INTEGERS))
    return table, indices, offsets.to(d.pick(INTEGERS)), False, mode, False, weights, last, d.pick([-1, 0])


@samples(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def bag(d: Draw):
    return drawn(d), {}


@samples(aten._embedding_bag_backward.default)
def bag_gradient(d: Draw):
    table, indices, offsets, scale, mode, sparse, weights, last, padding = drawn(d)
    scale = d.flag() and mode != MAX
    out, *rest = aten._embedding_bag(table, indices, offsets, scale, mode, sparse, weights, last, padding)
    grad = d.floats(*out.shape, dtype=F64)
    return (grad, indices, offsets, *rest, len(table), scale, mode, sparse, weights, padding), {}


@samples(aten._embedding_bag_per_sample_weights_backward.default)
def weights_gradient(d: Draw):
    table, indices, offsets, _, _, _, _, last, padding = drawn(d)
    out, bag, *_ = aten._embedding_bag(table, indices, offsets, False, SUM, False, None, last, padding)
    return (d.floats(*out.shape, dtype=F64), table, indices, offsets, bag, SUM, padding), {}
