"""ASGD: stochastic gradient descent that also averages its parameters.

With g the gradient (negated if `maximize`), t the step, w the weight decay, and the rates eta, which starts at lr, and
mu, which starts at 1:

    g <- g + w p
    p <- p - eta lambda p - eta g
    a <- p if mu = 1, else a + mu (p - a)
    eta <- lr / (1 + lambda lr t)^alpha
    mu <- 1 / max(1, t - t0)

Polyak and Juditsky, "Acceleration of stochastic approximation by averaging" (1992). In torch, lambda is `lambd` and a
is `ax`; eta and mu are 0-d tensors per parameter.
"""

import torch
from torch import Tensor

from tutti.tracing.optimizers.gradient import penalized
from tutti.tracing.optimizers.precision import number, value_of
from tutti.tracing.optimizers.table import Group, State, register

copy = torch.ops.aten.copy.default  # in the dtype and on the device of the old value, which may not be the CPU


def _state(group: Group, param: Tensor) -> State:
    return {"eta": number(value_of(group["lr"]), param), "mu": number(1, param), "ax": torch.zeros_like(param)}


@register(
    torch.optim.ASGD,
    state=_state,
    options=("lambd", "alpha", "t0", "weight_decay", "maximize"),
    supports={"differentiable": False},
)
def asgd(group: Group, param: Tensor, grad: Tensor, state: State, step: Tensor, lr: Tensor) -> tuple[Tensor, State]:
    lambd, t, eta, mu = group["lambd"], step.to(torch.float64), state["eta"], state["mu"]
    grad = penalized(group, param, grad)
    shrink = (1 - lambd * eta.to(torch.float64)).to(param.dtype)
    new = param * shrink - eta.to(param.dtype) * grad
    mean = torch.where(mu == 1, new, state["ax"] + (new - state["ax"]) * mu.to(param.dtype))
    later_eta = lr / (1 + lambd * lr * t) ** group["alpha"]
    later_mu = 1 / (t - group["t0"]).clamp(min=1)
    return new, {"eta": copy(eta, later_eta), "mu": copy(mu, later_mu), "ax": mean}
