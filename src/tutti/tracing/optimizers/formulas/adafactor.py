"""Adafactor: second moments of a matrix as the product of a row and a column.

With g the gradient (negated if `maximize`), t the step, lambda the weight decay, and RMS the root of the mean square:

    rate = max(eps2, RMS(p)) min(lr, 1 / sqrt(t))
    p <- p - lr lambda p
    r <- r + t^tau (mean of g^2 over the last dim - r)
    c <- c + t^tau (mean of g^2 over the dim before - c)
    v <- r c / max(mean of r, eps1)
    u <- g / max(sqrt(v), eps1)
    p <- p - rate u / max(1, RMS(u) / d)

A vector keeps its second moments whole: v <- v + t^tau (g^2 - v). Where eps1 is None, it is the spacing of numbers near
1 in the dtype of the parameter.

Shazeer and Stern, "Adafactor: adaptive learning rates with sublinear memory cost" (2018), algorithm 5; torch uses lr
and eps1 differently. In torch, tau is `beta2_decay`, r `row_var`, c `col_var`, v `variance`.
"""

import torch
from torch import Tensor

from tutti.tracing.optimizers.gradient import shrunk, signed
from tutti.tracing.optimizers.precision import wide
from tutti.tracing.optimizers.table import Group, State, register


def _state(group: Group, param: Tensor) -> State:
    if param.ndim < 2:
        return {"variance": torch.zeros_like(param)}
    *batch, rows, columns = param.shape
    return {"row_var": param.new_zeros((*batch, rows, 1)), "col_var": param.new_zeros((*batch, 1, columns))}


@register(
    torch.optim.Adafactor,
    state=_state,
    options=("beta2_decay", "eps", "d", "weight_decay", "maximize"),
    low_precision=True,
)
def adafactor(
    group: Group, param: Tensor, grad: Tensor, state: State, step: Tensor, lr: Tensor
) -> tuple[Tensor, State]:
    eps1, eps2 = group["eps"]
    eps1 = torch.finfo(param.dtype).eps if eps1 is None else eps1
    p, g, t = wide(param), signed(group, wide(grad)), step.to(torch.float64)
    weight = (t ** group["beta2_decay"]).to(p.dtype)
    rate = _rms(p).clamp(min=eps2).to(torch.float64) * torch.minimum(lr, t.rsqrt())
    p = shrunk(p, lr, group["weight_decay"])
    if "variance" in state:
        new = {"variance": torch.lerp(wide(state["variance"]), g * g, weight)}
        variance = new["variance"]
    else:
        row = torch.lerp(wide(state["row_var"]), g.square().mean(-1, keepdim=True), weight)
        column = torch.lerp(wide(state["col_var"]), g.square().mean(-2, keepdim=True), weight)
        new = {"row_var": row, "col_var": column}
        variance = row * column / row.mean(-2, keepdim=True).clamp(min=eps1)
    u = variance.clamp(min=eps1 * eps1).rsqrt() * g
    rate = rate / (_rms(u).to(torch.float64) / group["d"]).clamp(min=1)
    return (p - rate.to(p.dtype) * u).to(param.dtype), {key: x.to(state[key].dtype) for key, x in new.items()}


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()
