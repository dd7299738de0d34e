"""LAMB: Adam whose step in each tensor is scaled to the norm of the tensor.

With g the gradient (negated if `maximize`), lambda the weight decay, and norms over a whole parameter tensor:

    m <- b1 m + (1 - b1) g          (m <- b1 m + g without `grad_averaging`)
    v <- b2 v + (1 - b2) g^2
    p <- p - lr lambda p            (without `weight_decouple`: u <- u + lambda p below)
    u <- m / (sqrt(v) + eps)
    p <- p - lr / (1 - b1^t) r u,  r = min(|p|, 10) / (|u| + eps), or 1 if |p| or |u| is 0, or if `adam`

v has no correction of its bias, as in version 3 of the paper; that of m is in the step size, as in pytorch_optimizer.

You et al., "Large batch optimization for deep learning: training BERT in 76 minutes" (2020), algorithm 2.
"""

import torch
from torch import Tensor

from tutti.tracing.optimizers.gradient import shrunk_by
from tutti.tracing.optimizers.table import Group, State, register_named

LARGEST = 10.0  # norm of a parameter that counts


def _state(group: Group, param: Tensor) -> State:
    return {key: torch.zeros_like(param) for key in ("exp_avg", "exp_avg_sq")}


@register_named(
    "tutti.Lamb",
    "pytorch_optimizer.Lamb",
    state=_state,
    options=("betas", "eps", "weight_decay", "weight_decouple", "fixed_decay", "grad_averaging", "max_grad_norm",
             "adam", "maximize"),
    supports={"rectify": False},
    attributes={"pre_norm": False, "maximize": False},
)  # fmt: skip
def lamb(group: Group, param: Tensor, grad: Tensor, state: State, step: Tensor, lr: Tensor) -> tuple[Tensor, State]:
    (beta1, beta2), eps, decay = group["betas"], group["eps"], group["weight_decay"]
    grad = -grad if group.get("maximize") else grad
    decoupled = group.get("weight_decouple", True)
    share = 1 - beta1 if group.get("grad_averaging", True) else 1.0
    average = torch.add(state["exp_avg"] * beta1, grad, alpha=share)
    square = torch.addcmul(state["exp_avg_sq"] * beta2, grad, grad, value=1 - beta2)
    param = shrunk_by(group, param, lr) if decoupled else param
    direction = average / (square.sqrt() + eps)
    if decay and not decoupled:
        direction = torch.add(direction, param, alpha=decay)
    ratio = torch.ones((), dtype=param.dtype, device=param.device)
    if not group.get("adam"):
        param_norm, step_norm = _norm(param).clamp(max=LARGEST), _norm(direction)
        ratio = torch.where((param_norm != 0) & (step_norm != 0), param_norm / (step_norm + eps), ratio)
    rate = lr / (1 - beta1 ** step.to(torch.float64))
    return param - rate.to(param.dtype) * ratio * direction, {"exp_avg": average, "exp_avg_sq": square}


def _norm(x: Tensor) -> Tensor:
    return x.square().sum().sqrt()
