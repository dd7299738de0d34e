"""RMSprop, also centered and with momentum.

With g the gradient (negated if `maximize`), lambda the weight decay and mu the momentum:

    g <- g + lambda p
    v <- alpha v + (1 - alpha) g^2
    a <- alpha a + (1 - alpha) g          (centered)
    d <- g / (sqrt(v - a^2 if centered else v) + eps)
    b <- mu b + d                         (momentum)
    p <- p - lr (b if momentum else d)

Hinton, "Neural networks for machine learning", lecture 6 (2012); Graves, "Generating sequences with recurrent neural
networks" (2013), equation 38 for the centered variant. In torch, v is `square_avg`, a `grad_avg`, b `momentum_buffer`.
"""

import torch
from torch import Tensor

from tutti.tracing.optimizers.gradient import penalized
from tutti.tracing.optimizers.table import Group, State, register


def _state(group: Group, param: Tensor) -> State:
    buffers = {"square_avg": True, "momentum_buffer": group["momentum"] > 0, "grad_avg": group["centered"]}
    return {key: torch.zeros_like(param) for key, used in buffers.items() if used}


@register(
    torch.optim.RMSprop,
    state=_state,
    options=("alpha", "eps", "weight_decay", "momentum", "centered", "maximize"),
    supports={"differentiable": False},
)
def rmsprop(group: Group, param: Tensor, grad: Tensor, state: State, step: Tensor, lr: Tensor) -> tuple[Tensor, State]:
    alpha = group["alpha"]
    grad = penalized(group, param, grad)
    variance = square = torch.addcmul(state["square_avg"] * alpha, grad, grad, value=1 - alpha)
    new: State = {"square_avg": square}
    if group["centered"]:
        new["grad_avg"] = mean = torch.lerp(state["grad_avg"], grad, 1 - alpha)
        variance = torch.addcmul(square, mean, mean, value=-1)
    root, rate = variance.sqrt() + group["eps"], lr.to(param.dtype)
    if group["momentum"] > 0:
        new["momentum_buffer"] = buffer = state["momentum_buffer"] * group["momentum"] + grad / root
        return param - rate * buffer, new
    return param - rate * grad / root, new
