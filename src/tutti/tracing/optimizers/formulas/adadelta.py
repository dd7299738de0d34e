"""Adadelta.

With g the gradient (negated if `maximize`) and lambda the weight decay:

    g <- g + lambda p
    v <- rho v + (1 - rho) g^2
    d <- sqrt(u + eps) / sqrt(v + eps) * g
    u <- rho u + (1 - rho) d^2
    p <- p - lr d

Zeiler, "ADADELTA: an adaptive learning rate method" (2012), algorithm 1. In torch, v is `square_avg` and u `acc_delta`.
"""

import torch
from torch import Tensor

from tutti.tracing.optimizers.gradient import penalized
from tutti.tracing.optimizers.table import Group, State, register


@register(
    torch.optim.Adadelta,
    state=lambda group, param: {key: torch.zeros_like(param) for key in ("square_avg", "acc_delta")},
    options=("rho", "eps", "weight_decay", "maximize"),
    supports={"differentiable": False},
)
def adadelta(group: Group, param: Tensor, grad: Tensor, state: State, step: Tensor, lr: Tensor) -> tuple[Tensor, State]:
    rho, eps = group["rho"], group["eps"]
    grad = penalized(group, param, grad)
    square = torch.addcmul(state["square_avg"] * rho, grad, grad, value=1 - rho)
    delta = (state["acc_delta"] + eps).sqrt() / (square + eps).sqrt() * grad
    total = torch.addcmul(state["acc_delta"] * rho, delta, delta, value=1 - rho)
    return param - lr.to(param.dtype) * delta, {"square_avg": square, "acc_delta": total}
