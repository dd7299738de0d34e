"""torch.optim optimizers re-expressed as pure updates, so that the update is part of the captured graph.

A ``torch.optim`` instance is only read: its class picks an entry of ``TABLE``, its parameter groups give the
constants, and its state, where it has stepped already, the initial values. The update itself,

    new_param, new_state = update(optimizer, group, param, grad, state, step, lr)

has no effects and is made of ATen operators and ``tutti::adam``; all but ``lr`` and ``step`` is constant.
It gives torch's own numbers to the last bit or two.

Another optimizer is one function:

    @register(torch.optim.Adagrad, state=lambda group: ("sum",), supports={"lr_decay": 0})
    def adagrad(group, param, grad, state, step, lr): ...
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import tutti.nn.adam
import tutti.nn.rounding  # noqa: F401  (registers the operators)

Group = dict[str, Any]
State = dict[str, Tensor]
Update = Callable[..., tuple[Tensor, State]]

LOW_PRECISION = (torch.bfloat16, torch.float16)

# Keys of a parameter group that choose an implementation in torch and change no number here.
WITHOUT_EFFECT = frozenset({"params", "param_names", "lr", "initial_lr", "foreach", "fused", "capturable"})


@dataclass(frozen=True)
class Rule:
    """One optimizer as a pure function.

    ``state(group)`` names the tensors kept per parameter, under the keys of ``optimizer.state``. ``options``
    are the keys of a parameter group that ``update`` honours; ``supports`` gives, for keys that it does not,
    the only value that may be left in them. ``counts`` tells whether torch keeps a "step" in the state, ``fused``
    whether ``update`` also takes ``skip`` and ``scale`` (see `update`), and gradients of any dtype.
    """

    update: Update
    state: Callable[[Group], tuple[str, ...]]
    options: frozenset[str] = frozenset()
    supports: dict[str, Any] = field(default_factory=dict)
    counts: bool = True
    fused: bool = False


TABLE: dict[type[Optimizer], Rule] = {}


def register(
    *classes: type[Optimizer],
    state: Callable[[Group], tuple[str, ...]],
    options: tuple[str, ...] = (),
    supports: dict[str, Any] | None = None,
    counts: bool = True,
    fused: bool = False,
) -> Callable[[Update], Update]:
    """Enter a pure update for ``classes`` into ``TABLE``; see ``Rule`` for the arguments."""

    def enter(update: Update) -> Update:
        for cls in classes:
            TABLE[cls] = Rule(update, state, frozenset(options), dict(supports or {}), counts, fused)
        return update

    return enter


def state_of(optimizer: Optimizer, name_of: dict[Parameter, str], masters: bool = False) -> dict[str, State]:
    """Initial optimizer state of every parameter of ``optimizer``, by parameter name. See ``states_of``."""
    return dict(states_of(optimizer, name_of, masters))


def states_of(
    optimizer: Optimizer, name_of: dict[Parameter, str], masters: bool = False
) -> Iterator[tuple[str, State]]:
    """Parameter names of ``optimizer`` with their initial state, which is made as it is asked for.

    Values are copies of ``optimizer.state`` where the optimizer has stepped, else zeros, in the dtype and
    on the device of the parameter (a meta or fake parameter gets meta or fake state). With ``masters``, a
    bfloat16 or float16 parameter also gets "master", its float32 copy, and its other state is float32.

    Raises ``ValueError`` for an optimizer without a pure form, a parameter that ``name_of`` does not know,
    and a parameter without state in an optimizer that has stepped.
    """
    rule = _rule(optimizer)
    stepped = any(optimizer.state.values())
    for group, param in _parameters(optimizer):
        _check(optimizer, group)
        if param not in name_of:
            raise ValueError(
                f"{_name(optimizer)} holds a parameter of shape {tuple(param.shape)} that is not in the "
                "model; build the optimizer from model.parameters() of the model being parallelized"
            )
        if not param.requires_grad:
            continue
        if param.is_complex():
            raise ValueError(f"parameter {name_of[param]} is complex; split it into real and imaginary parts")
        keys = rule.state(group)
        missing = [key for key in keys if key not in optimizer.state.get(param, {})]
        if missing and stepped:
            raise ValueError(
                f"{_name(optimizer)} has stepped, but parameter {name_of[param]} has no {missing[0]}; "
                "freeze it with requires_grad_(False), or start from a fresh optimizer"
            )
        mastered = masters and param.dtype in LOW_PRECISION
        value = param.detach()
        held = {"master": value.to(torch.float32)} if mastered else {}
        for key in keys:
            like = held.get("master", value)
            old = None if missing else optimizer.state[param][key].detach()
            held[key] = torch.zeros_like(like) if old is None else torch.empty_like(like).copy_(old)
        yield name_of[param], held


def step_count(optimizer: Optimizer) -> int:
    """Number of updates that ``optimizer`` has done: 0 when fresh.

    An optimizer that does not count (SGD) reports 1 once it holds momentum: all that its update asks.
    Parameters that disagree are a ``ValueError``, because one step number drives the whole graph.
    """
    rule = _rule(optimizer)
    if not rule.counts:
        return int(any(v is not None for held in optimizer.state.values() for v in held.values()))
    counts = {int(held["step"]) for held in optimizer.state.values() if "step" in held}
    if len(counts) > 1:
        raise ValueError(
            f"the parameters of {_name(optimizer)} have done different numbers of updates: {sorted(counts)}; "
            "one number is needed, so start from a fresh optimizer or one that updated all of them together"
        )
    return counts.pop() if counts else 0


def update(
    optimizer: Optimizer, group: Group, param: Tensor, grad: Tensor, state: State, step: Tensor, lr: Tensor,
    skip: Tensor | None = None, scale: Tensor | None = None, stochastic: bool = False,
) -> tuple[Tensor, State]:  # fmt: skip
    """One parameter's update: ``(new_param, new_state)``, with the shapes, dtypes and keys of what came in.

    ``step`` is the 0-d int64 number of this update, 1 for the first; ``lr`` a 0-d float64 tensor. With a
    "master" in ``state`` the update is done on it in float32, and the parameter is its rounding. Where ``skip``,
    a 0-d float32 tensor, is 1, all stays bit for bit what it was. ``scale``, a 0-d tensor of at least float32,
    multiplies the gradient. ``stochastic``: what is bfloat16 is updated in float32 and rounded at random
    (``tutti.nn.rounding``), so that steps which are too small for it are made on average; without masters.
    """
    rule = _rule(optimizer)
    _check(optimizer, group)
    if stochastic and param.dtype is torch.bfloat16:
        wide = {key: value.to(torch.float32) for key, value in state.items()}
        new, held = _chosen(rule, group, param.to(torch.float32), grad, wide, step, lr, skip, scale)
        return _rounded(new), {key: _rounded(value) for key, value in held.items()}
    if "master" not in state:
        return _chosen(rule, group, param, grad, state, step, lr, skip, scale)
    held = {key: value for key, value in state.items() if key != "master"}
    master, held = _chosen(rule, group, state["master"], grad, held, step, lr, skip, scale)
    return master.to(param.dtype), {"master": master, **held}


def _rounded(x: Tensor) -> Tensor:
    return torch.ops.tutti.round_stochastically(x, torch.rand_like(x))


def _chosen(rule: Rule, group: Group, param: Tensor, grad: Tensor, state: State, step: Tensor, lr: Tensor,
            skip: Tensor | None, scale: Tensor | None) -> tuple[Tensor, State]:  # fmt: skip
    """What an update makes of a gradient that is scaled, or what was there before."""
    if rule.fused:
        return rule.update(group, param, grad, state, step, lr, skip, scale)
    grad = grad if scale is None else _wide(grad) * scale
    new, held = rule.update(group, param, grad.to(param.dtype), state, step, lr)
    if skip is None:
        return new, held
    stays = skip != 0
    return torch.where(stays, param, new), {key: torch.where(stays, state[key], x) for key, x in held.items()}


def global_norm(grads: list[Tensor]) -> Tensor:
    """The 2-norm of all gradients together, a 0-d tensor of at least float32."""
    return torch.cat([_squared(grad).reshape(1) for grad in grads]).sum().sqrt()


def _squared(grad: Tensor) -> Tensor:
    if grad.dtype in LOW_PRECISION:  # compiled, one pass with the cast
        return _wide(grad).square().sum()
    flat = grad.reshape(-1)
    return torch.dot(flat, flat)


def not_finite(norm: Tensor) -> Tensor:
    """1 where a norm is infinite or NaN, else 0: a 0-d float32 tensor."""
    return torch.isfinite(norm).logical_not().to(torch.float32)


def poisoned(grads: dict[str, Tensor], loss: Tensor) -> dict[str, Tensor]:
    """The gradients, the last of the smallest with x - x of the loss added: 0, or NaN where it is not finite. Whoever
    looks at the gradients of all microbatches, on whatever devices, knows of all losses then."""
    last = min(reversed(grads), key=lambda name: grads[name].numel())
    return {**grads, last: grads[last] + (loss - loss)}


def clip_scale(norm: Tensor, max_norm: float) -> Tensor:
    """What ``torch.nn.utils.clip_grad_norm_`` (2-norm) multiplies gradients with: min(1, max_norm / (norm + 1e-6)), a
    0-d tensor of the dtype of the norm.

    Sums run in float32 for bfloat16 gradients too (`global_norm`), where torch rounds the norm to bfloat16.
    """
    if not max_norm > 0:
        raise ValueError(f"clip_norm is {max_norm}; it must be positive (leave clipping off with None)")
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


@register(
    torch.optim.SGD,
    state=lambda group: ("momentum_buffer",) if group["momentum"] else (),
    options=("momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    supports={"differentiable": False},
    counts=False,
)
def sgd(group: Group, param: Tensor, grad: Tensor, state: State, step: Tensor, lr: Tensor) -> tuple[Tensor, State]:
    """b <- mu b + (1 - tau) g, the first time b <- g;  p <- p - lr (g + mu b if nesterov else b)."""
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
    rate = lr.to(_wide_dtype(param))
    return (_wide(param) - rate * _wide(grad)).to(param.dtype), new_state


@register(
    torch.optim.Adam,
    torch.optim.AdamW,
    state=lambda group: ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ())),
    options=("betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay"),
    supports={"differentiable": False},
    fused=True,
)
def adam(
    group: Group, param: Tensor, grad: Tensor, state: State, step: Tensor, lr: Tensor,
    skip: Tensor | None, scale: Tensor | None,
) -> tuple[Tensor, State]:  # fmt: skip
    """See ``tutti.nn.adam``; AdamW differs from Adam in ``decoupled_weight_decay`` of its groups."""
    beta1, beta2 = group["betas"]
    op = torch.ops.tutti.adam_amsgrad if group["amsgrad"] else torch.ops.tutti.adam
    new_param, *moments = op(
        param,
        grad,
        *(state[key] for key in _ADAM_KEYS if key in state),
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
    return new_param, dict(zip(_ADAM_KEYS, moments, strict=False))


_ADAM_KEYS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def _rule(optimizer: Optimizer) -> Rule:
    rule = TABLE.get(type(optimizer))
    if rule is None:
        known = ", ".join(sorted(cls.__name__ for cls in TABLE))
        raise ValueError(
            f"optimizer {_name(optimizer)} has no pure form; supported are {known}, and "
            "tutti.graph.optimizers.register adds another"
        )
    return rule


def _check(optimizer: Optimizer, group: Group) -> None:
    rule = _rule(optimizer)
    for key, value in group.items():
        if key in WITHOUT_EFFECT or key in rule.options:
            continue
        if key in rule.supports and value == rule.supports[key]:
            continue
        if key in rule.supports:
            raise ValueError(
                f"{_name(optimizer)}({key}={value!r}) is not supported; only {key}={rule.supports[key]!r} is"
            )
        if key in optimizer.defaults:
            known = ", ".join(sorted(rule.options))
            raise ValueError(f"option {key} of {_name(optimizer)} is not supported; supported are {known}")


def _parameters(optimizer: Optimizer) -> Iterator[tuple[Group, Parameter]]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            yield group, param


def _name(optimizer: Optimizer) -> str:
    return type(optimizer).__name__


def _wide_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.dtype in LOW_PRECISION else tensor.dtype


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(_wide_dtype(tensor))
