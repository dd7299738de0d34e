"""Muon for the matrices of hidden layers and AdamW for all other parameters, chosen by `use_muon` of a group.

The formulas are those of `tutti.tracing.optimizers.formulas.muon` and `tutti.tracing.optimizers.formulas.adam`.
"""

import torch
from torch import Tensor

from tutti.tracing.optimizers.formulas import adam, muon
from tutti.tracing.optimizers.table import Group, State, register_named


def _state(group: Group, param: Tensor) -> State:
    if not group["use_muon"]:
        return {key: torch.zeros_like(param) for key in ("exp_avg", "exp_avg_sq")}
    if param.ndim != 2:
        raise ValueError(f"a group with use_muon=True has a parameter of shape {tuple(param.shape)}; Muon updates "
                         "matrices: put it into a group with use_muon=False")  # fmt: skip
    return {"momentum_buffer": torch.zeros_like(param)}


@register_named(
    "tutti.Muon",
    state=_state,
    options=("use_muon", "weight_decay", "momentum", "nesterov", "ns_coefficients", "ns_steps", "ns_dtype",
             "adjust_lr_fn", "betas", "eps"),
)  # fmt: skip
def muon_adamw(
    group: Group, param: Tensor, grad: Tensor, state: State, step: Tensor, lr: Tensor
) -> tuple[Tensor, State]:
    if group["use_muon"]:
        return muon.muon({**group, "eps": 1e-7}, param, grad, state, step, lr)
    options = {**group, "amsgrad": False, "maximize": False, "decoupled_weight_decay": True}
    return adam.adam(options, param, grad, state, step, lr, None, None)
