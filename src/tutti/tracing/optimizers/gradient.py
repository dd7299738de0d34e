"""Weight decay and maximization, which most optimizers apply in the same way before their own formula."""

import torch
from torch import Tensor

from tutti.tracing.optimizers.table import Group


def signed(group: Group, grad: Tensor) -> Tensor:
    """The gradient of what is minimized: -g if `maximize`."""
    return -grad if group["maximize"] else grad


def penalized(group: Group, param: Tensor, grad: Tensor) -> Tensor:
    """g <- g + lambda p, the gradient with an L2 penalty (`weight_decay`)."""
    decay = group["weight_decay"]
    return torch.add(signed(group, grad), param, alpha=decay) if decay else signed(group, grad)


def decayed(group: Group, param: Tensor, grad: Tensor, lr: Tensor) -> tuple[Tensor, Tensor]:
    """Parameter and gradient after weight decay: p <- p - lr lambda p if `decoupled_weight_decay`, else `penalized`."""
    if group["weight_decay"] and group["decoupled_weight_decay"]:
        return shrunk(param, lr, group["weight_decay"]), signed(group, grad)
    return param, penalized(group, param, grad)


def shrunk(param: Tensor, lr: Tensor, decay: float) -> Tensor:
    """p <- p - lr lambda p, decoupled weight decay."""
    return param * (1 - lr * decay).to(param.dtype) if decay else param


def shrunk_by(group: Group, param: Tensor, lr: Tensor) -> Tensor:
    """p <- p - lr lambda p, or p <- p - lambda p if `fixed_decay`."""
    decay = group["weight_decay"]
    return param * (1 - decay) if decay and group.get("fixed_decay") else shrunk(param, lr, decay)


def weight_decayed(group: Group, param: Tensor, grad: Tensor, lr: Tensor) -> tuple[Tensor, Tensor]:
    """Parameter and gradient after weight decay: `shrunk_by`, or g <- g + lambda p without `weight_decouple`."""
    if group.get("weight_decouple", True):
        return shrunk_by(group, param, lr), grad
    decay = group["weight_decay"]
    return param, torch.add(grad, param, alpha=decay) if decay else grad
