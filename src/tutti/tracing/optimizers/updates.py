"""One parameter's update: the optimizer's rule, with masters, loss scaling, skipping, rounding and marks around it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import tutti.nn.quantized.rounding  # noqa: F401  (registers the operators)
from tutti.tracing.optimizers.lookup import check_options, rule_of
from tutti.tracing.optimizers.marks import CENTRALIZE, EMA, EMA_DECAY, averaged, centralized
from tutti.tracing.optimizers.precision import wide
from tutti.tracing.optimizers.table import Group, State, UpdateRule


def update(
    optimizer: Optimizer, group: Group, param: Tensor, grad: Tensor, state: State, step: Tensor, lr: Tensor,
    skip: Tensor | None = None, scale: Tensor | None = None, stochastic: bool = False,
) -> tuple[Tensor, State]:  # fmt: skip
    """Return `(new_param, new_state)`, with the shapes, dtypes and keys of `param` and `state`.

    Args:
        step: 0-d int64, the number of this update, 1 for the first.
        lr: 0-d float64.
        skip: 0-d float32. If it is 1, the results equal `param` and `state` bit for bit.
        scale: 0-d, at least float32; multiplies the gradient.
        stochastic: update bfloat16 tensors in float32 and round them at random (`tutti.nn.quantized.rounding`), so that
            updates smaller than the spacing of bfloat16 take effect on average. Not with masters.

    If `state` has a "master", it is updated in float32 and the parameter is its rounding. A complex parameter is
    updated as the real tensor of its real and imaginary parts, as in torch. `centralize` and `ema_decay` of the group
    are honoured (`marks`).
    """
    rule = rule_of(optimizer)
    check_options(optimizer, group)
    if param.is_complex():
        parts = {key: _parts(value) for key, value in state.items()}
        numbers = step, lr, skip, scale, stochastic
        new, new_state = update(optimizer, group, _parts(param), _parts(grad), parts, *numbers)
        whole = {key: torch.complex(*x.unbind(-1)) if state[key].is_complex() else x for key, x in new_state.items()}
        return torch.complex(*new.unbind(-1)), whole
    if group.get(CENTRALIZE):
        grad = centralized(grad)
    if EMA in state:
        rule_state = {key: value for key, value in state.items() if key != EMA}
        new, new_state = _updated(rule, group, param, grad, rule_state, step, lr, skip, scale, stochastic)
        average = averaged(group[EMA_DECAY], state[EMA], new_state.get("master", new), skip)
        return new, {**new_state, EMA: average}
    return _updated(rule, group, param, grad, state, step, lr, skip, scale, stochastic)


def _updated(rule: UpdateRule, group: Group, param: Tensor, grad: Tensor, state: State, step: Tensor, lr: Tensor,
             skip: Tensor | None, scale: Tensor | None, stochastic: bool) -> tuple[Tensor, State]:  # fmt: skip
    """Apply the rule's update with masters or stochastic rounding."""
    if stochastic and param.dtype is torch.bfloat16:
        widened = {key: wide(value) for key, value in state.items()}
        new, new_state = _chosen(rule, group, param.to(torch.float32), grad, widened, step, lr, skip, scale)
        return _rounded(new), {k: _rounded(x) if state[k].dtype is torch.bfloat16 else x for k, x in new_state.items()}
    if "master" not in state:
        return _chosen(rule, group, param, grad, state, step, lr, skip, scale)
    rule_state = {key: value for key, value in state.items() if key != "master"}
    master, new_state = _chosen(rule, group, state["master"], grad, rule_state, step, lr, skip, scale)
    return master.to(param.dtype), {"master": master, **new_state}


def _parts(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def _rounded(x: Tensor) -> Tensor:
    return torch.ops.tutti.round_stochastically(x, torch.rand_like(x))


def _chosen(rule: UpdateRule, group: Group, param: Tensor, grad: Tensor, state: State, step: Tensor, lr: Tensor,
            skip: Tensor | None, scale: Tensor | None) -> tuple[Tensor, State]:  # fmt: skip
    """Apply the rule's update with the scaled gradient. Returns the old values if the update is skipped."""
    group = _Constants(group)
    if rule.fused:
        return rule.update(group, param, grad, state, step, lr, skip, scale)
    grad = (grad if scale is None else wide(grad) * scale).to(param.dtype)
    if rule.low_precision:
        results = rule.update(group, param, grad, state, step, lr)
    else:
        widened = {key: wide(value) for key, value in state.items()}
        results = rule.update(group, wide(param), wide(grad), widened, step, lr)
    new, new_state = _checked(rule, param, state, results)
    new, new_state = _like(new, param), {key: _like(new_state[key], old) for key, old in state.items()}
    if skip is None:
        return new, new_state
    stays = skip != 0
    return torch.where(stays, param, new), {key: torch.where(stays, state[key], x) for key, x in new_state.items()}


def _like(new: Tensor, old: Tensor) -> Tensor:
    """`new` in the dtype and on the device of `old`: numbers computed from the step alone are on the CPU."""
    return new.to(old.dtype) if new.device == old.device else torch.ops.aten.copy.default(old, new)


class _Constants(Group):
    """A parameter group without its learning rate, which changes: reading it raises ValueError."""

    def __init__(self, group: Group):
        super().__init__({key: value for key, value in group.items() if key != "lr"})

    def __missing__(self, key: str) -> Any:
        if key == "lr":
            raise ValueError("the update reads group['lr'], which would stay as it is at the first step; "
                             "use the argument lr, which holds the rate of each step")  # fmt: skip
        raise KeyError(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self or key == "lr" else default


def _checked(rule: UpdateRule, param: Tensor, state: State, results: tuple[Tensor, State]) -> tuple[Tensor, State]:
    """The results of an update. Raises ValueError for a wrong number of results, wrong names and shapes."""
    name = getattr(rule.update, "__name__", "the update")
    if not isinstance(results, tuple) or len(results) != 2 or not isinstance(results[1], Mapping):
        raise ValueError(f"{name} returned {type(results).__name__}; it must return the new parameter and a dict of "
                         "the new state, which is empty for an optimizer without state")  # fmt: skip
    new, new_state = results
    if new_state.keys() != state.keys():
        raise ValueError(f"{name} returned the state {sorted(new_state)}, but was given {sorted(state)}")
    for key, old, x in (("the parameter", param, new), *((key, old, new_state[key]) for key, old in state.items())):
        if x.shape != old.shape:
            raise ValueError(f"{name} returned {key} with shape {tuple(x.shape)}; it must be {tuple(old.shape)}")
    return new, new_state
