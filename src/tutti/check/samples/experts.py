"""Dropless experts, forward and backward."""

import torch

from tutti.check.samples.sample import Draw, samples
from tutti.nn.activation import ACTIVATIONS

ops = torch.ops.tutti


def drawn(d: Draw):
    """Tensors and options."""
    tokens, experts = d.sizes(2, (2, 4, 6))
    hidden, width, k = *d.sizes(2, (2, 4)), d.size((1, 2))
    index = d.integers(tokens, k, below=experts)
    shapes = [(tokens, hidden), (experts, (1 + d.flag()) * width, hidden), (experts, hidden, width)]
    x, up, down = (d.floats(*shape, dtype=torch.float64) for shape in shapes)
    return (x, index, d.positive(tokens, k), up, down), (d.pick(list(ACTIVATIONS)), 0, experts)


@samples(ops.experts.default)
def experts(d: Draw):
    tensors, options = drawn(d)
    return (*tensors, *options), {}


@samples(ops.experts_backward.default)
def experts_backward(d: Draw):
    tensors, options = drawn(d)
    return (d.floats(*tensors[0].shape, dtype=torch.float64), *tensors, *options), {}
