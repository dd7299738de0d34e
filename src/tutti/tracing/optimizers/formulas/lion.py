"""Lion: the sign of an interpolation between momentum and gradient.

With g the gradient (negated if `maximize`), m the momentum and lambda the weight decay:

    p <- p - lr lambda p
    p <- p - lr sign(b1 m + (1 - b1) g)
    m <- b2 m + (1 - b2) g

With `fixed_decay`, the first line is p <- p - lambda p; without `weight_decouple` it is g <- g + lambda p.

Chen et al., "Symbolic discovery of optimization algorithms" (2023), algorithm 2.
"""

import torch
from torch import Tensor

from tutti.tracing.optimizers.gradient import weight_decayed
from tutti.tracing.optimizers.table import Group, State, register_named


@register_named(
    "tutti.Lion",
    "pytorch_optimizer.Lion",
    state=lambda group, param: {"exp_avg": torch.zeros_like(param)},
    options=("betas", "weight_decay", "weight_decouple", "fixed_decay", "maximize"),
    attributes={"maximize": False},
)
def lion(group: Group, param: Tensor, grad: Tensor, state: State, step: Tensor, lr: Tensor) -> tuple[Tensor, State]:
    beta1, beta2 = group["betas"]
    grad = -grad if group.get("maximize") else grad
    param, grad = weight_decayed(group, param, grad, lr)
    average = state["exp_avg"]
    direction = torch.lerp(average, grad, 1 - beta1).sign()
    return param - lr.to(param.dtype) * direction, {"exp_avg": torch.lerp(average, grad, 1 - beta2)}
