"""Rprop: the sign of the gradient, with a step size per element.

With g the gradient (negated if `maximize`), q the previous one, which starts at 0, and the step sizes d, which start at
lr:

    d <- clamp(d * (eta+ if g q > 0, eta- if g q < 0, else 1), smallest, largest)
    g <- 0 if g q < 0
    p <- p - sign(g) d
    q <- g

Riedmiller and Braun, "A direct adaptive method for faster backpropagation learning: the RPROP algorithm" (1993), as in
torch: without taking back a step after a change of sign. Later changes of lr have no effect.
"""

import torch
from torch import Tensor

from tutti.tracing.optimizers.gradient import signed
from tutti.tracing.optimizers.precision import value_of
from tutti.tracing.optimizers.table import Group, State, register


@register(
    torch.optim.Rprop,
    state=lambda group, param: {
        "prev": torch.zeros_like(param),
        "step_size": torch.full_like(param, value_of(group["lr"]) * (1 + 1j if param.is_complex() else 1)),
    },
    options=("etas", "step_sizes", "maximize"),
    supports={"differentiable": False},
)
def rprop(group: Group, param: Tensor, grad: Tensor, state: State, step: Tensor, lr: Tensor) -> tuple[Tensor, State]:
    (slower, faster), (smallest, largest) = group["etas"], group["step_sizes"]
    grad = signed(group, grad)
    agree = grad * state["prev"]
    factor = torch.where(agree > 0, faster, torch.where(agree < 0, slower, torch.ones_like(grad)))
    size = (state["step_size"] * factor).clamp(smallest, largest)
    grad = torch.where(agree < 0, 0.0, grad)
    return param - grad.sign() * size, {"prev": grad, "step_size": size}
