"""Dropless experts, forward and backward."""

import torch

from tutti.check.samples.sample import Draw, samples
from tutti.nn.activation import ACTIVATIONS
from tutti.nn.experts.gate import CLAMPED

ops = torch.ops.tutti


def drawn(d: Draw):
    """Tensors and options."""
    tokens, experts = d.sizes(2, (2, 4, 6))
    hidden, width, k = *d.sizes(2, (2, 4)), d.size((1, 2))
    index = d.integers(tokens, k, below=experts)
    activation = d.pick([*ACTIVATIONS, f"{CLAMPED}:1.7:2.0"])
    halves = 2 if activation.startswith(CLAMPED) else 1 + d.flag()
    shapes = [(tokens, hidden), (experts, halves * width, hidden), (experts, hidden, width)]
    x, up, down = (d.floats(*shape, dtype=torch.float64) for shape in shapes)
    biases = [d.floats(*t.shape[:2], dtype=torch.float64) for t in (up, down)] if d.flag() else [None, None]
    return (x, index, d.positive(tokens, k), up, down, *biases), (activation, 0, experts, "", -1)


@samples(ops.experts.default)
def experts(d: Draw):
    tensors, options = drawn(d)
    return (*tensors, *options), {}


@samples(ops.experts_backward.default)
def experts_backward(d: Draw):
    tensors, options = drawn(d)
    return (d.floats(*tensors[0].shape, dtype=torch.float64), *tensors, *options), {}
