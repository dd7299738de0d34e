"""LSTM layers, forward and backward."""

import torch

from tutti.check.samples.sample import Draw, samples

ops = torch.ops.tutti


def drawn(d: Draw):
    """Tensors and options of a layer."""
    time, batch, features, hidden = d.pick([1, 2, 4]), d.pick([1, 2, 4, 6]), d.pick([1, 2, 4]), d.pick([2, 4])
    w, biased = [(4 * hidden, features), (4 * hidden, hidden)], d.flag()
    w += [(4 * hidden,)] * 2 if biased else w
    shapes = [(time, batch, features), *w, (batch, hidden), (batch, hidden)]
    tensors = [d.floats(*shape, dtype=torch.float32) / 2 for shape in shapes]
    return tensors, (d.flag(), [], 2, hidden, 1, biased, False, False)


@samples(ops.lstm_layer.default)
def layer(d: Draw):
    tensors, options = drawn(d)
    return (*tensors, *options), {}


@samples(ops.lstm_layer_backward.default)
def layer_backward(d: Draw):
    tensors, options = drawn(d)
    x, h = tensors[0], tensors[5]
    gradients = [d.floats(*x.shape[:2], h.shape[1], dtype=torch.float32), None, None]
    if d.flag():
        gradients[1:] = (d.floats(*h.shape, dtype=torch.float32) for _ in range(2))
    return (*tensors, *gradients, *options), {}
