"""The table of optimizers: a class of optimizers, and its update as a pure function."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

Group = dict[str, Any]
State = dict[str, Tensor]
Update = Callable[..., tuple[Tensor, State]]


@dataclass(frozen=True)
class UpdateRule:
    """One optimizer as a pure function. See `register_optimizer` for the fields."""

    update: Update
    state: Callable[[Group, Tensor], State]
    options: frozenset[str] = frozenset()
    supports: dict[str, Any] = field(default_factory=dict)
    low_precision: bool = False
    fused: bool = False
    attributes: dict[str, Any] = field(default_factory=dict)


TABLE: dict[type[Optimizer], UpdateRule] = {}
NAMED: dict[str, UpdateRule] = {}  # "package.Class" -> rule, for classes that are not imported here


def rule_for(cls: type) -> UpdateRule | None:
    """The rule of exactly this class, by the class itself or by its top-level package and name."""
    return TABLE.get(cls) or NAMED.get(f"{cls.__module__.partition('.')[0]}.{cls.__name__}")


def register_optimizer(
    *classes: type[Optimizer],
    state: Callable[[Group, Tensor], State] = lambda group, param: {},
    options: tuple[str, ...] = (),
    supports: dict[str, Any] | None = None,
    low_precision: bool = False,
    fused: bool = False,
) -> Callable[[Update], Update]:
    """Register a pure update function for one or more optimizer classes.

    The decorated function computes the update of one parameter and returns the new parameter and the new state:

    >>> class Signum(torch.optim.Optimizer):
    ...     def __init__(self, params, lr=0.01, momentum=0.9):
    ...         super().__init__(params, {"lr": lr, "momentum": momentum})
    ...
    >>> @tutti.register_optimizer(
    ...     Signum,
    ...     state=lambda group, param: {"momentum_buffer": torch.zeros_like(param)},
    ...     options=("momentum",),
    ... )
    ... def signum(group, param, grad, state, step, lr):
    ...     buffer = torch.lerp(grad, state["momentum_buffer"], group["momentum"])
    ...     return param - lr.to(param.dtype) * buffer.sign(), {"momentum_buffer": buffer}

    `group` is the parameter group (a dict of constants). `param`, `grad` and the values of `state` are float32 or
    float64: bfloat16 and float16 tensors are widened before the call, and the results are rounded after it. `step` is
    the number of this update, 0-d int64, 1 for the first. `lr` is the learning rate, 0-d float64. The function is
    traced once: it must not modify its arguments, or branch on the values of a tensor (use `torch.where`).

    Args:
        classes: the optimizer classes. Subclasses that do not override the update use the same function.
        state: `state(group, param)` returns the initial state of a parameter, as a dict of tensors of any shape. It
            uses the keys of `optimizer.state[param]`, except for the update count, "step". If the optimizer has
            stepped, its own values replace the initial ones. Defaults to no state.
        options: the keys of a parameter group that the function reads, besides "lr".
        supports: for each key that the function ignores, the only value it may have. Other values are rejected.
        low_precision: pass bfloat16 and float16 tensors without widening them.
        fused: call `update(..., lr, skip, scale)` with a gradient of any dtype. The function then multiplies the
            gradient by `scale` and returns its inputs unchanged if `skip` is 1; either may be None.

    Raises:
        ValueError: if an option is neither a parameter of the class nor a key that its `__init__` sets.
    """
    for cls in classes:
        _check_options(cls, options)

    def enter(update: Update) -> Update:
        for cls in classes:
            TABLE[cls] = UpdateRule(update, state, frozenset(options), dict(supports or {}), low_precision, fused)
        return update

    return enter


def register_named(
    *names: str,
    state: Callable[[Group, Tensor], State],
    options: tuple[str, ...],
    supports: dict[str, Any] | None = None,
    attributes: dict[str, Any] | None = None,
    low_precision: bool = False,
) -> Callable[[Update], Update]:
    """Register a pure update for classes of packages that need not be installed.

    names: "package.Class", the top-level package and the name of a class: "transformers.Adafactor". Classes of
        `tutti.optim` are named here too, because that package is imported on first use.
    attributes: attributes of the optimizer with the only value they may have.

    The other arguments are those of `register_optimizer`.
    """

    def enter(update: Update) -> Update:
        rule = UpdateRule(update, state, frozenset(options), dict(supports or {}), low_precision, False,
                    dict(attributes or {}))  # fmt: skip
        NAMED.update(dict.fromkeys(names, rule))
        return update

    return enter


def _check_options(cls: type[Optimizer], options: tuple[str, ...]) -> None:
    parameters, written = {}, set()
    for base in cls.__mro__[: cls.__mro__.index(Optimizer)]:
        init = base.__init__
        parameters |= dict.fromkeys(key for key in inspect.signature(init).parameters if key not in ("self", "params"))
        code = getattr(inspect.unwrap(init), "__code__", None)
        for constant in code.co_consts if code else ():
            written |= set(constant) if isinstance(constant, tuple) else {constant}  # keys of a dict are one tuple
    if unknown := [name for name in options if name not in parameters and name not in written]:
        raise ValueError(f"{cls.__name__} has no option {unknown[0]!r}; it has {', '.join(parameters) or 'none'}")


register = register_optimizer
