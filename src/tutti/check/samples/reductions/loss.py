"""Losses and their gradients, for every reduction."""

import torch

from tutti.check.samples.sample import Draw, samples

aten = torch.ops.aten
F64 = torch.float64
NONE = 0


def reduced(d: Draw, shape: tuple[int, ...]) -> tuple[int, torch.Tensor]:
    """A code of reduction and a gradient of the loss."""
    reduction = d.between(0, 2)
    return reduction, d.floats(*(shape if reduction == NONE else ()), dtype=F64)


OPTIONS = {
    aten.mse_loss.default: (),
    aten.smooth_l1_loss.default: (0.5,),
    aten.huber_loss.default: (0.5,),
    aten.soft_margin_loss.default: (),
}


@samples(*OPTIONS)
def entrywise(d: Draw, target):
    shape = d.shape(0, 3)
    return (d.floats(*shape, dtype=F64), d.floats(*shape, dtype=F64), d.between(0, 2), *OPTIONS[target]), {}


GRADIENTS = {
    aten.mse_loss_backward.default: (),
    aten.smooth_l1_loss_backward.default: (0.5,),
    aten.huber_loss_backward.default: (0.5,),
    aten.soft_margin_loss_backward.default: (),
}


@samples(*GRADIENTS)
def entrywise_gradient(d: Draw, target):
    shape = d.shape(0, 3)
    reduction, grad = reduced(d, shape)
    return (grad, d.floats(*shape, dtype=F64), d.floats(*shape, dtype=F64), reduction, *GRADIENTS[target]), {}


def probabilities(d: Draw):
    shape = d.shape(0, 3)
    weights = d.pick([None, d.positive(*shape), d.positive(*shape[1:])])
    return d.positive(*shape) / 1.2, d.booleans(*shape).to(F64), weights


@samples(aten.binary_cross_entropy.default)
def binary_cross_entropy(d: Draw):
    return (*probabilities(d), d.between(0, 2)), {}


@samples(aten.binary_cross_entropy_backward.default)
def binary_cross_entropy_backward(d: Draw):
    x, y, weights = probabilities(d)
    reduction, grad = reduced(d, x.shape)
    return (grad, x, y, weights, reduction), {}


@samples(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(d: Draw):
    x, y, weights = probabilities(d)
    more = d.pick([None, d.positive(*x.shape), d.positive(*x.shape[1:])])
    return (x, y, weights, more, d.between(0, 2)), {}


def classified(d: Draw, more: tuple[int, ...] | None):
    """Draw scores, classes and maybe class weights for positions of a batch, or for one position (`more` is None)."""
    classes = d.size((2, 3, 4, 6))
    batch = () if more is None else (d.size((1, 2, 4, 6)),)
    x = d.floats(*batch, classes, *(more or ()), dtype=F64)
    return x, d.integers(*batch, *(more or ()), below=classes), d.positive(classes) if d.flag() else None


@samples(aten.multi_margin_loss.default)
def multi_margin(d: Draw):
    x, y, weights = classified(d, ())
    return (x, y, d.pick([1, 2]), 1.5, weights, d.between(0, 2)), {}


@samples(aten.multi_margin_loss_backward.default)
def multi_margin_backward(d: Draw):
    x, y, weights = classified(d, ())
    reduction, grad = reduced(d, y.shape)
    return (grad, x, y, d.pick([1, 2]), 1.5, weights, reduction), {}


def scored(d: Draw, target):
    """Arguments of a negative log-likelihood; the class that is ignored may occur."""
    flat = target in (aten.nll_loss_forward.default, aten.nll_loss_backward.default)
    x, y, weights = classified(d, d.pick([None, (), ()]) if flat else (d.size((1, 2, 4)), 2))
    ignored = d.pick([-100, 0])
    if y.ndim and ignored < 0 and d.flag():
        y[0] = ignored
    return x, y, weights, ignored


@samples(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll(d: Draw, target):
    x, y, weights, ignored = scored(d, target)
    return (x, y, weights, d.between(0, 2), ignored), {}


@samples(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_backward(d: Draw, target):
    x, y, weights, ignored = scored(d, target)
    reduction, grad = reduced(d, y.shape)
    loss = aten.nll_loss_forward if target is aten.nll_loss_backward.default else aten.nll_loss2d_forward
    total = loss(x, y, weights, reduction, ignored)[1]
    return (grad, x, y, weights, reduction, ignored, total), {}


def labelled(d: Draw):
    """Sequences, their labels in rows or one behind another, and the lengths of both; some cannot be aligned."""
    time, batch, classes, room = d.size((4, 6)), d.size((1, 2, 4)), d.size((2, 3)), d.size((1, 2))
    lengths = d.integers(batch, low=time - 2, below=time + 1), d.integers(batch, low=1, below=room + 1)
    labels = d.integers(batch, room, low=1, below=classes)
    targets = labels if d.flag() else torch.cat([row[:n] for row, n in zip(labels, lengths[1], strict=True)])
    options = 0, d.flag()
    return (d.floats(time, batch, classes, dtype=F64).log_softmax(-1), targets, *lengths), options


@samples(torch.ops.tutti.ctc_loss.default)
def ctc_loss(d: Draw):
    operands, options = labelled(d)
    return (*operands, *options), {}


@samples(torch.ops.tutti.ctc_loss_backward.default)
def ctc_loss_backward(d: Draw):
    operands, options = labelled(d)
    loss, alpha = torch.ops.tutti.ctc_loss(*operands, *options)
    return (d.floats(len(loss), dtype=F64), *operands, loss, alpha, *options), {}


def several(d: Draw):
    """Scores, and classes of which those before the first -1 count."""
    n, classes = d.size((1, 2, 4, 6)), d.size((2, 3, 4))
    targets = d.floats(n, classes).argsort(1).masked_fill(d.booleans(n, classes), -1)
    return d.floats(n, classes, dtype=F64), targets


@samples(aten.multilabel_margin_loss_forward.default)
def multilabel_margin(d: Draw):
    return (*several(d), d.between(0, 2)), {}


@samples(aten.multilabel_margin_loss_backward.default)
def multilabel_margin_backward(d: Draw):
    x, y = several(d)
    reduction, grad = reduced(d, x.shape[:1])
    return (grad, x, y, reduction, aten.multilabel_margin_loss_forward(x, y, reduction)[1]), {}
