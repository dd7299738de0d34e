"""RAdam: Adam with a rectified variance.

With g the gradient (negated if `maximize`), t the step and lambda the weight decay:

    p <- p - lr lambda p                  (decoupled)        or  g <- g + lambda p
    m <- beta1 m + (1 - beta1) g
    v <- beta2 v + (1 - beta2) g^2
    rho_inf = 2 / (1 - beta2) - 1
    rho = rho_inf - 2 t beta2^t / (1 - beta2^t)
    r = sqrt((rho - 4) (rho - 2) rho_inf / ((rho_inf - 4) (rho_inf - 2) rho)) sqrt(1 - beta2^t) / (sqrt(v) + eps)
    p <- p - lr / (1 - beta1^t) * m * (r if rho > 5 else 1)

Liu et al., "On the variance of the adaptive learning rate and beyond" (2020), algorithm 2.
"""

import torch
from torch import Tensor

from tutti.tracing.optimizers.gradient import decayed
from tutti.tracing.optimizers.table import Group, State, register


@register(
    torch.optim.RAdam,
    state=lambda group, param: {key: torch.zeros_like(param) for key in ("exp_avg", "exp_avg_sq")},
    options=("betas", "eps", "weight_decay", "decoupled_weight_decay", "maximize"),
    supports={"differentiable": False},
)
def radam(group: Group, param: Tensor, grad: Tensor, state: State, step: Tensor, lr: Tensor) -> tuple[Tensor, State]:
    beta1, beta2 = group["betas"]
    param, grad = decayed(group, param, grad, lr)
    mean = torch.lerp(state["exp_avg"], grad, 1 - beta1)
    square = torch.addcmul(state["exp_avg_sq"] * beta2, grad, grad, value=1 - beta2)
    t = step.to(torch.float64)
    unbiased, longest = 1 - beta2**t, 2 / (1 - beta2) - 1
    length = longest - 2 * t * beta2**t / unbiased
    ratio = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    adaptive = (ratio * unbiased).sqrt().to(param.dtype) / (square.sqrt() + group["eps"])
    rate = (lr / (1 - beta1**t)).to(param.dtype)
    new = param - rate * mean * torch.where(length > 5, adaptive, 1.0)
    return new, {"exp_avg": mean, "exp_avg_sq": square}
