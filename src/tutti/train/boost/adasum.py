"""AdaSum: gradients of several parts of a batch are added where they are orthogonal, and averaged where they agree.

The batch is divided into k equal parts, k a power of two. The gradients g of a parameter on them are combined in pairs,
then the results in pairs, until one is left:

    adasum(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b

with products and norms over the whole parameter. Orthogonal gradients are added; equal ones are averaged. 1e-12 is
added to each product. A parameter with fewer than k elements cannot be divided among k devices; its gradients are
averaged.

On one device this has no gain: each part has a forward and a backward pass of its own, over fewer rows, and each
parameter three more reductions. Where each part is on a device of its own anyway, it lets a batch grow with the number
of devices without a new learning rate, for SGD. Adam's steps do not depend on the scale of a gradient, so that adding
instead of averaging changes little.

Maleki et al., "Scaling distributed training with adaptive summation" (2021). `mindspore.boost.AdaSum` applies the same
formula to the changes of weights that k optimizers make; here it is applied to gradients, before clipping and before
the optimizer, so that there is one optimizer state. The loss is ordinary PyTorch: the parts of the batch are separate
computations, which a plan may place on different devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tutti.tracing.batch import Batch
from tutti.train.boost.algorithm import Algorithm, Loss, loss_with
from tutti.train.values import Outputs

ITEMS = "num_items_in_batch"

EPSILON = 1e-12


@dataclass
class AdaSum(Algorithm):
    """Combine the gradients of equal parts of each batch with AdaSum.

    parts: number of parts, a power of two. The batch must divide. Batch norm sees one part at a time.

    Raises ValueError if it is no power of two.
    """

    parts: int = 2

    def __post_init__(self):
        if self.parts < 1 or self.parts & (self.parts - 1):
            raise ValueError(f"parts is {self.parts!r}; adasum needs a power of two, such as 4")

    def loss(self, loss: Loss) -> Loss:
        return in_parts(loss, self.parts) if self.parts > 1 else loss


def adasum(gradients: Sequence[Tensor]) -> Tensor:
    """Combine gradients of one parameter. Their number is a power of two."""
    if gradients[0].numel() < len(gradients):
        return torch.stack(list(gradients)).mean(0)
    while len(gradients) > 1:
        gradients = [pair(a, b) for a, b in zip(gradients[::2], gradients[1::2], strict=True)]
    return gradients[0]


def pair(a: Tensor, b: Tensor) -> Tensor:
    """adasum(a, b). Low-precision gradients are combined in float32."""
    x, y = a.to(torch.promote_types(a.dtype, torch.float32)), b.to(torch.promote_types(b.dtype, torch.float32))
    product = (x * y).sum() + EPSILON
    own, other = x.square().sum() + EPSILON, y.square().sum() + EPSILON
    return ((1 - product / (2 * own)) * x + (1 - product / (2 * other)) * y).to(a.dtype)


def in_parts(loss: Loss, parts: int) -> Loss:
    """A loss whose value is the mean over equal parts of the batch, and whose gradients are their AdaSum.

    In evaluation mode it is the loss of the whole batch. Metrics of the parts are averaged if they are 0-d, else
    concatenated along dim 0.
    """

    def value(model: nn.Module, batch: Batch) -> Outputs:
        if not model.training:
            return loss(model, batch)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        copies, values = {name: _Copies.apply(p, parts) for name, p in trained.items()}, []
        for i, part in enumerate(divided(batch, parts)):
            tensors = {name: each[i] for name, each in copies.items()}
            values.append(loss_with(tensors, model, part, loss))
        if isinstance(values[0], tuple):
            return _mean([x for x, _ in values]), {key: _joined([x[key] for _, x in values]) for key in values[0][1]}
        return _mean(values)

    return value


def divided(batch: Batch, parts: int) -> list[Batch]:
    """Equal parts of a batch along dim 0. Entries whose dim 0 is not the batch size are shared by all parts.

    The batch size is the size of dim 0 of the first tensor. Raises ValueError if it does not divide.
    """
    leaves, tree = pytree.tree_flatten(batch)
    rows = next((x.shape[0] for x in leaves if isinstance(x, Tensor) and x.ndim), 0)
    if rows % parts or not rows:
        raise ValueError(f"adasum divides a batch into {parts} equal parts, but it has {rows} rows")
    size = rows // parts

    def part(x: object, i: int) -> object:
        if not isinstance(x, Tensor) or not x.ndim or x.shape[0] != rows:
            return x
        return x[i * size : (i + 1) * size]

    parts_of_batch = [pytree.tree_unflatten([part(x, i) for x in leaves], tree) for i in range(parts)]
    if isinstance(batch, Mapping) and ITEMS in batch:  # what a part divides its sum by, for the mean over parts
        parts_of_batch = [{**one, ITEMS: batch[ITEMS] / parts} for one in parts_of_batch]
    return parts_of_batch


class _Copies(torch.autograd.Function):
    """A parameter as many times; the gradient is the AdaSum of the gradients of the copies, times their number.

    The mean over the parts divides each gradient by the number of parts, and AdaSum is homogeneous.
    """

    @staticmethod
    def forward(ctx: object, parameter: Tensor, parts: int) -> tuple[Tensor, ...]:
        return tuple(parameter.view_as(parameter) for _ in range(parts))

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return adasum([g * len(gradients) for g in gradients]), None


def _mean(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values)).mean(0)


def _joined(values: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(values)) if values[0].ndim else _mean(values)
