"""SGD with momentum.

With g the gradient (negated if `maximize`), mu the momentum, tau the dampening and lambda the weight decay:

    g <- g + lambda p
    b <- mu b + (1 - tau) g, in the first step b <- g
    p <- p - lr (g + mu b if nesterov else b)

Sutskever et al., "On the importance of initialization and momentum in deep learning" (2013).
"""

import torch
from torch import Tensor

from tutti.tracing.optimizers.precision import wide, wide_dtype
from tutti.tracing.optimizers.table import Group, State, register


def _state(group: Group, param: Tensor) -> State:
    return {"momentum_buffer": torch.zeros_like(param)} if group["momentum"] else {}


@register(
    torch.optim.SGD,
    state=_state,
    options=("momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    supports={"differentiable": False},
    low_precision=True,
)
def sgd(group: Group, param: Tensor, grad: Tensor, state: State, step: Tensor, lr: Tensor) -> tuple[Tensor, State]:
    momentum, dampening = group["momentum"], group["dampening"]
    if group["maximize"]:
        grad = -grad
    if group["weight_decay"]:
        grad = torch.add(grad, param, alpha=group["weight_decay"])
    new_state: State = {}
    if momentum:
        buffer = torch.add(state["momentum_buffer"] * momentum, grad, alpha=1 - dampening)
        if dampening:
            buffer = torch.where(step == 1, grad, buffer)
        new_state["momentum_buffer"] = buffer
        grad = torch.add(grad, buffer, alpha=momentum) if group["nesterov"] else buffer
    rate = lr.to(wide_dtype(param))
    return (wide(param) - rate * wide(grad)).to(param.dtype), new_state
