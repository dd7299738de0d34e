"""NAdam: Adam with Nesterov momentum.

With g the gradient (negated if `maximize`), t the step, lambda the weight decay, psi the `momentum_decay`, and the
product M of all mu so far, which starts at 1:

    p <- p - lr lambda p                  (decoupled)        or  g <- g + lambda p
    mu(t) = beta1 (1 - 0.96^(t psi) / 2)
    M <- M mu(t)
    m <- beta1 m + (1 - beta1) g
    v <- beta2 v + (1 - beta2) g^2
    d <- sqrt(v / (1 - beta2^t)) + eps
    p <- p - lr (1 - mu(t)) / (1 - M) * g / d - lr mu(t + 1) / (1 - M mu(t + 1)) * m / d

Dozat, "Incorporating Nesterov momentum into Adam" (2016). In torch, M is `mu_product`, a 0-d tensor per parameter.
"""

import torch
from torch import Tensor

from tutti.tracing.optimizers.gradient import decayed
from tutti.tracing.optimizers.precision import number
from tutti.tracing.optimizers.table import Group, State, register


def _state(group: Group, param: Tensor) -> State:
    means = {key: torch.zeros_like(param) for key in ("exp_avg", "exp_avg_sq")}
    return {"mu_product": number(1, param), **means}


@register(
    torch.optim.NAdam,
    state=_state,
    options=("betas", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay", "maximize"),
    supports={"differentiable": False},
)
def nadam(group: Group, param: Tensor, grad: Tensor, state: State, step: Tensor, lr: Tensor) -> tuple[Tensor, State]:
    beta1, beta2 = group["betas"]
    param, grad = decayed(group, param, grad, lr)
    t, psi = step.to(torch.float64), group["momentum_decay"]
    mu, mu_next = (beta1 * (1 - 0.5 * 0.96 ** (n * psi)) for n in (t, t + 1))
    product = state["mu_product"] * mu.to(state["mu_product"].dtype)
    mean = torch.lerp(state["exp_avg"], grad, 1 - beta1)
    square = torch.addcmul(state["exp_avg_sq"] * beta2, grad, grad, value=1 - beta2)
    root = (square / (1 - beta2**t).to(param.dtype)).sqrt() + group["eps"]
    so_far = product.to(torch.float64)
    of_grad = (lr * (1 - mu) / (1 - so_far)).to(param.dtype)
    of_mean = (lr * mu_next / (1 - so_far * mu_next)).to(param.dtype)
    new = param - of_grad * grad / root - of_mean * mean / root
    return new, {"mu_product": product, "exp_avg": mean, "exp_avg_sq": square}
