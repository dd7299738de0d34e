"""Embeddings."""

import torch

from tutti.check.samples.sample import Draw, samples

aten = torch.ops.aten


@samples(aten.embedding.default)
def embedding(d: Draw):
    rows = d.size()
    return (d.floats(rows, d.size()), d.integers(*d.shape(0, 3), below=rows).to(d.pick([torch.int64, torch.int32]))), {}


@samples(aten.embedding_dense_backward.default)
def embedding_backward(d: Draw):
    rows, at = d.size(), d.shape(1, 2)
    padding = d.pick([-1, 0, rows - 1])
    return (d.floats(*at, d.size()), d.integers(*at, below=rows), rows, padding, d.flag()), {}
