"""Adafactor as in fairseq and transformers: relative steps, and optional momentum.

With g the gradient, t the step, lambda the weight decay, and RMS the root of the mean square:

    rate = lr, or with `relative_step` min(1e-2, 1 / sqrt(t)), where `warmup_init` replaces 1e-2 by 1e-6 t
    rate <- rate max(eps2, RMS(p))  with `scale_parameter`
    b = 1 - t^`decay_rate`
    r <- b r + (1 - b) (mean of g^2 + eps1 over the last dim)
    c <- b c + (1 - b) (mean of g^2 + eps1 over the dim before)
    u <- g / sqrt(r c / mean of r)
    u <- rate u / max(1, RMS(u) / `clip_threshold`)
    m <- beta1 m + (1 - beta1) u,  u <- m        unless beta1 is None
    p <- p - rate lambda p - u

A vector keeps its second moments whole: v <- b v + (1 - b) (g^2 + eps1), u <- g / sqrt(v).

Shazeer and Stern, "Adafactor: adaptive learning rates with sublinear memory cost" (2018). `torch.optim.Adafactor` is
`tutti.tracing.optimizers.formulas.adafactor`.
"""

import torch
from torch import Tensor

from tutti.tracing.optimizers.precision import wide, wide_dtype
from tutti.tracing.optimizers.table import Group, State, register_named


def _state(group: Group, param: Tensor) -> State:
    state, dtype = {}, wide_dtype(param)
    if group["beta1"] is not None:
        state["exp_avg"] = torch.zeros_like(param, dtype=dtype)
    if param.ndim < 2:
        return {**state, "exp_avg_sq": torch.zeros_like(param, dtype=dtype)}
    *batch, rows, columns = param.shape
    state["exp_avg_sq_row"] = param.new_zeros((*batch, rows), dtype=dtype)
    return {**state, "exp_avg_sq_col": param.new_zeros((*batch, columns), dtype=dtype)}


@register_named(
    "transformers.Adafactor",
    state=_state,
    options=("eps", "clip_threshold", "decay_rate", "beta1", "weight_decay", "scale_parameter", "relative_step",
             "warmup_init"),
    low_precision=True,
)  # fmt: skip
def adafactor_relative(
    group: Group, param: Tensor, grad: Tensor, state: State, step: Tensor, lr: Tensor
) -> tuple[Tensor, State]:
    eps1, eps2 = group["eps"]
    p, g, t = wide(param), wide(grad), step.to(torch.float64)
    rate = lr
    if group["relative_step"]:
        rate = torch.minimum(1e-6 * t if group["warmup_init"] else torch.full_like(t, 1e-2), t.rsqrt())
    rate = rate.to(p.dtype)
    if group["scale_parameter"]:
        rate = rate * _rms(p).clamp(min=eps2)
    share = (t ** group["decay_rate"]).to(p.dtype)  # 1 - b
    squares, new = g.square() + eps1, {}
    if "exp_avg_sq" in state:
        new["exp_avg_sq"] = torch.lerp(wide(state["exp_avg_sq"]), squares, share)
        u = new["exp_avg_sq"].rsqrt() * g
    else:
        row = torch.lerp(wide(state["exp_avg_sq_row"]), squares.mean(-1), share)
        column = torch.lerp(wide(state["exp_avg_sq_col"]), squares.mean(-2), share)
        new |= {"exp_avg_sq_row": row, "exp_avg_sq_col": column}
        u = (row / row.mean(-1, keepdim=True)).rsqrt().unsqueeze(-1) * column.unsqueeze(-2).rsqrt() * g
    u = u / (_rms(u) / group["clip_threshold"]).clamp(min=1.0) * rate
    if "exp_avg" in state:
        u = new["exp_avg"] = torch.lerp(u, wide(state["exp_avg"]), group["beta1"])
    p = p * (1 - group["weight_decay"] * rate) if group["weight_decay"] else p
    return (p - u).to(param.dtype), new


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()
