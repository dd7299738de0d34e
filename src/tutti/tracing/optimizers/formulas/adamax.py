"""Adamax: Adam with an infinity norm.

With g the gradient (negated if `maximize`), t the step and lambda the weight decay:

    g <- g + lambda p
    m <- beta1 m + (1 - beta1) g
    u <- max(beta2 u, |g| + eps)
    p <- p - lr / (1 - beta1^t) * m / u

Kingma and Ba, "Adam" (2015), algorithm 2. In torch, m is `exp_avg` and u `exp_inf`.
"""

import torch
from torch import Tensor

from tutti.tracing.optimizers.gradient import penalized
from tutti.tracing.optimizers.table import Group, State, register


@register(
    torch.optim.Adamax,
    state=lambda group, param: {key: torch.zeros_like(param) for key in ("exp_avg", "exp_inf")},
    options=("betas", "eps", "weight_decay", "maximize"),
    supports={"differentiable": False},
)
def adamax(group: Group, param: Tensor, grad: Tensor, state: State, step: Tensor, lr: Tensor) -> tuple[Tensor, State]:
    beta1, beta2 = group["betas"]
    grad = penalized(group, param, grad)
    mean = torch.lerp(state["exp_avg"], grad, 1 - beta1)
    norm = torch.maximum(state["exp_inf"] * beta2, grad.abs() + group["eps"])
    rate = lr / (1 - beta1 ** step.to(torch.float64))
    return param - rate.to(param.dtype) * mean / norm, {"exp_avg": mean, "exp_inf": norm}
