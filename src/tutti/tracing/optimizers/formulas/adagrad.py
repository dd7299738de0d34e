"""Adagrad.

With g the gradient (negated if `maximize`), t the step, lambda the weight decay, eta the `lr_decay`, and s starting at
`initial_accumulator_value`:

    g <- g + lambda p
    s <- s + g^2
    p <- p - lr / (1 + (t - 1) eta) * g / (sqrt(s) + eps)

Duchi, Hazan and Singer, "Adaptive subgradient methods for online learning and stochastic optimization" (2011).
"""

import torch
from torch import Tensor

from tutti.tracing.optimizers.gradient import penalized
from tutti.tracing.optimizers.table import Group, State, register


@register(
    torch.optim.Adagrad,
    state=lambda group, param: {"sum": torch.full_like(param, group["initial_accumulator_value"])},
    options=("lr_decay", "weight_decay", "initial_accumulator_value", "eps", "maximize"),
    supports={"differentiable": False},
)
def adagrad(group: Group, param: Tensor, grad: Tensor, state: State, step: Tensor, lr: Tensor) -> tuple[Tensor, State]:
    grad = penalized(group, param, grad)
    total = torch.addcmul(state["sum"], grad, grad)
    rate = lr / (1 + (step - 1).to(torch.float64) * group["lr_decay"])
    return param - rate.to(param.dtype) * grad / (total.sqrt() + group["eps"]), {"sum": total}
