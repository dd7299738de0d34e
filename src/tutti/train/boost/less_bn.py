"""Fewer batch norms in residual networks, and a normalized head.

A residual block adds a main branch to a shortcut. In a main branch conv - BN - ReLU - conv - BN [- ReLU - conv - BN]
only the last batch norm, next to the addition, is kept; the others are removed. The shortcut may be the identity or
conv - BN, which stays. In a ResNet-50, 2 of the 3 in each main branch go.

The last linear layer becomes a normalized one, which bounds the scale of the logits that batch norms held before:

    y = s (x / |x|) (W / |W|)^T,    with a bias b: y = s ((x / |x|) (W / |W|)^T + b)

norms taken over each row; s is trained and begins as `multiplier`. Cosines lie between -1 and 1, so that s bounds how
small the cross-entropy of C classes can be: log(1 + (C - 1) exp(-s C / (C - 1))), Proposition 2 of Wang et al.,
"NormFace" (2017). s begins where this is about 1e-4, at (C - 1) / C log((C - 1) / 1e-4): 10.3 for 10 classes. From
s = 1, as in MindSpore, many steps pass until s is large enough, and the accuracy of a short run suffers.

The algorithm and the head (`CommonHeadLastFN`) are those of `mindspore.boost.LessBN`, which matches three convolutions
in a branch and drops the bias; here two are enough, as in a ResNet-18.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn import functional as F

from tutti.tracing.batch import Batch
from tutti.train.boost.algorithm import Algorithm, Loss, NothingToDo, default_loss

LEAST_LOSS = 1e-4


@dataclass
class LessBN(Algorithm):
    """Remove the inner batch norms of residual branches, and normalize the last linear layer.

    head: whether to replace the last linear layer.
    multiplier: first value of the head's scale s, a trained parameter of shape (1,). None: that of `first_multiplier`.
    bias: keep the bias of the head, if it has one.

    `prepare_model` raises NothingToDo if the model has no residual branch with an inner batch norm, and ValueError if
    it has no linear layer for the head. Checkpoints of the changed model do not fit the original one.
    """

    head: bool = True
    multiplier: float | None = None
    bias: bool = False

    def prepare_model(self, model: nn.Module, batch: Batch, loss: Loss, steps: int | None = None) -> None:
        norms = inner_norms(model, batch, loss)
        if not norms:
            raise NothingToDo(f"less_bn found no residual branch conv - BN - ReLU - conv - BN in "
                              f"{type(model).__name__}; leave it out")  # fmt: skip
        linears = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
        if self.head and not linears:
            raise ValueError(f"less_bn normalizes the last linear layer, and {type(model).__name__} has none: give "
                             "head=False")  # fmt: skip
        for name in norms:
            _put(model, name, nn.Identity())
        if self.head:
            name, linear = linears[-1]
            scale = first_multiplier(linear.out_features) if self.multiplier is None else self.multiplier
            _put(model, name, NormalizedLinear(linear, scale, self.bias))


class NormalizedLinear(nn.Module):
    """y = s ((x / |x|) (W / |W|)^T + b), made of a linear layer, whose parameters it uses.

    x: (..., in_features). y: (..., out_features).
    """

    def __init__(self, linear: nn.Linear, multiplier: float = 1.0, bias: bool = False):
        super().__init__()
        self.weight = linear.weight  # (out_features, in_features)
        self.multiplier = nn.Parameter(torch.full_like(linear.weight[0, :1], multiplier))
        self.bias = linear.bias if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.multiplier * F.linear(F.normalize(x, dim=-1), F.normalize(self.weight, dim=-1), self.bias)


def first_multiplier(classes: int) -> float:
    """The scale of cosines at which a cross-entropy of 1e-4 can be reached; 1 for fewer than two classes."""
    return (classes - 1) / classes * math.log((classes - 1) / LEAST_LOSS) if classes > 1 else 1.0


def inner_norms(model: nn.Module, batch: Batch, loss: Loss = default_loss) -> list[str]:
    """Names of the batch norms inside of main branches of residual blocks, in the order of the model.

    `loss(model, batch)` runs once, in evaluation mode. The autograd graph of its value is searched for additions, and
    their operands for conv - BN - ReLU - conv - BN, up to the value that the other operand is computed from, too.
    """
    owners = {id(m.weight): name for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}
    norms: set[str] = set()
    with _evaluating(model), torch.enable_grad():
        value = loss(model, batch)
        value = value[0] if isinstance(value, tuple) else value
        for node in _nodes(value.grad_fn):
            if node.name().startswith("AddBackward") and len(node.next_functions) == 2:
                (a, _), (b, _) = node.next_functions
                for branch in (_branch(a, b), _branch(b, a)):
                    names = [owners.get(id(weight)) for weight in branch]
                    norms |= {name for name in names[1:] if name is not None}
    return [name for name, _ in model.named_modules() if name in norms]


def _branch(operand: Node | None, other: Node | None) -> list[Tensor]:
    """The weights of the batch norms of one operand of an addition, backwards, up to where both operands begin."""
    begins = {other, *(x for _, x in _chain(other))} - {None}
    weights = []
    for weight, source in _chain(operand):
        weights.append(weight)
        if source in begins:
            return weights
    return []


def _chain(node: Node | None) -> Iterator[tuple[Tensor, Node | None]]:
    """For BN - conv [- ReLU - BN - conv ...] backwards: the weight of each batch norm, and the input of its conv."""
    while node is not None and node.name().endswith("BatchNormBackward0"):
        conv, weight = node.next_functions[0][0], node.next_functions[1][0]
        if weight is None or conv is None or not conv.name().startswith("ConvolutionBackward"):
            return
        source = conv.next_functions[0][0]
        yield weight.variable, source  # pyright: ignore[reportAttributeAccessIssue]
        if source is None or not source.name().startswith("ReluBackward"):
            return
        node = source.next_functions[0][0]


def _nodes(start: Node | None) -> Iterator[Node]:
    seen, left = set(), [start]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            left += [x for x, _ in node.next_functions]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    trained = {p: p.requires_grad for p in model.parameters()}
    try:
        model.eval()
        for p in trained:
            p.requires_grad_(p.is_floating_point())
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for p, requires in trained.items():
            p.requires_grad_(requires)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace a submodule."""
    parent, _, key = name.rpartition(".")
    module.train(model.get_submodule(name).training)
    setattr(model.get_submodule(parent), key, module)
