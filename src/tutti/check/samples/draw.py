"""Drawing tokens."""

import torch

from tutti.check.samples.sample import Draw, samples


@samples(torch.ops.tutti.sample.default)
def sample(d: Draw):
    rows, vocabulary = d.sizes(2)
    options = d.positive(rows) * d.pick([0, 1]), d.integers(rows, below=4), d.positive(rows), d.positive(rows) / 4
    return (d.floats(rows, vocabulary), *options, d.positive(rows) - 0.1), {}
