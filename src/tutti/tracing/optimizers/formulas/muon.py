"""Muon: momentum, orthogonalized, for matrices only.

With g the gradient, mu the momentum, lambda the weight decay and (A, B) the shape:

    b <- mu b + (1 - mu) g
    x <- mu b + (1 - mu) g if nesterov else b
    p <- p - lr lambda p - lr s NS(x)

where s = sqrt(max(1, A / B)), or 0.2 sqrt(max(A, B)) for adjust_lr_fn="match_rms_adamw". NS is a Newton-Schulz
iteration in bfloat16, of `ns_steps` steps with the coefficients (a, b, c):

    x <- x / max(|x|, eps);  repeat x <- a x + (b G + c G^2) x with G = x x^T

Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024); Liu et al., "Muon is scalable for LLM
training" (2025).
"""

import math

import torch
from torch import Tensor

import tutti.nn.quantized.rounding  # noqa: F401  (registers the operator)
from tutti.nn.linear.ordered_mm import ordered_mm
from tutti.tracing.optimizers.gradient import shrunk
from tutti.tracing.optimizers.table import Group, State, register

SCALES = {
    None: lambda a, b: math.sqrt(max(1, a / b)),
    "original": lambda a, b: math.sqrt(max(1, a / b)),
    "match_rms_adamw": lambda a, b: 0.2 * math.sqrt(max(a, b)),
}


def _state(group: Group, param: Tensor) -> State:
    if param.ndim != 2:
        raise ValueError(f"Muon only supports 2D parameters whereas we found a parameter with size: {param.size()}")
    return {"momentum_buffer": torch.zeros_like(param)}


@register(
    torch.optim.Muon,
    state=_state,
    options=("weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"),
)
def muon(group: Group, param: Tensor, grad: Tensor, state: State, step: Tensor, lr: Tensor) -> tuple[Tensor, State]:
    momentum = group["momentum"]
    buffer = torch.lerp(state["momentum_buffer"], grad, 1 - momentum)
    direction = torch.lerp(grad, buffer, momentum) if group["nesterov"] else buffer
    narrow = group.get("ns_dtype", torch.bfloat16) is torch.bfloat16
    direction = orthogonalized(direction, group["ns_coefficients"], group["ns_steps"], group["eps"], narrow)
    rate = (lr * SCALES[group["adjust_lr_fn"]](*param.shape)).to(param.dtype)
    return shrunk(param, lr, group["weight_decay"]) - rate * direction.to(param.dtype), {"momentum_buffer": buffer}


def orthogonalized(
    x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float, narrow: bool = True
) -> Tensor:
    """Move the singular values of a matrix towards 1, in bfloat16 if `narrow`, else in the dtype of `x`.

    It rounds and adds up in the same order under every plan and level, because it amplifies rounding errors.
    """
    if steps >= 100:
        raise ValueError("Number of steps must be less than 100 for computational efficiency")
    if len(coefficients) != 3:
        raise ValueError("Coefficients must be a tuple of exactly 3 values")
    a, b, c = coefficients
    tall = x.shape[0] > x.shape[1]
    rounded = torch.ops.tutti.round_to_nearest if narrow else lambda y: y
    y = rounded(x)
    y = y.T if tall else y
    y = y / rounded((y.to(torch.float32) if narrow else y).square().sum().sqrt()).clamp(min=eps)
    for _ in range(steps):
        gram = ordered_mm(y, y.T)
        y = ordered_mm(ordered_mm(gram, gram, gram, beta=b, alpha=c), y, y, beta=a)
    return y.T if tall else y
