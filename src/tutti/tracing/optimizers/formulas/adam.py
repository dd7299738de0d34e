"""Adam and AdamW: the operator `tutti::adam`, see `tutti.nn.adam`.

AdamW differs from Adam in `decoupled_weight_decay` of its groups.
"""

import torch
from torch import Tensor

import tutti.nn.adam  # noqa: F401  (registers the operators)
from tutti.tracing.optimizers.table import Group, State, register

_KEYS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def _state(group: Group, param: Tensor) -> State:
    return {key: torch.zeros_like(param) for key in _KEYS[: 3 if group["amsgrad"] else 2]}


@register(
    torch.optim.Adam,
    torch.optim.AdamW,
    state=_state,
    options=("betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay"),
    supports={"differentiable": False},
    fused=True,
)
def adam(
    group: Group, param: Tensor, grad: Tensor, state: State, step: Tensor, lr: Tensor,
    skip: Tensor | None, scale: Tensor | None,
) -> tuple[Tensor, State]:  # fmt: skip
    beta1, beta2 = group["betas"]
    op = torch.ops.tutti.adam_amsgrad if group["amsgrad"] else torch.ops.tutti.adam
    new_param, *moments = op(
        param,
        grad,
        *(state[key] for key in _KEYS if key in state),
        step,
        lr,
        skip,
        scale,
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=bool(group["decoupled_weight_decay"]),
        maximize=bool(group["maximize"]),
    )
    return new_param, dict(zip(_KEYS, moments, strict=False))
