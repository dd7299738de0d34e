"""Finding the rule of an optimizer instance, and rejecting instances whose `step()` does more than the rule."""

import inspect

import torch
from torch.optim import Optimizer

from tutti import compat
from tutti.tracing.optimizers.marks import check_marks
from tutti.tracing.optimizers.table import NAMED, TABLE, Group, UpdateRule, rule_for

# Keys of a parameter group that select an implementation in torch and do not change the result.
WITHOUT_EFFECT = frozenset({"params", "param_names", "lr", "initial_lr", "foreach", "fused", "capturable"})

REFUSED: dict[type[Optimizer], str] = {
    torch.optim.LBFGS: "it evaluates the loss several times per step; the captured step evaluates it once",
    torch.optim.SparseAdam: "it needs sparse gradients; captured gradients are dense. Use torch.optim.Adam",
}

# Methods of an optimizer that take no part in the update: a subclass may override them.
NO_PART = frozenset({"add_param_group", "zero_grad", "state_dict", "load_state_dict", "share_memory"})


def check(optimizer: Optimizer) -> None:
    """Raise ValueError if the captured update would differ from `optimizer.step()`.

    That is the case for an optimizer without a rule, an option that its rule does not support, a step hook, and an
    overridden or patched method that takes part in the update.
    """
    check_hooks(optimizer)
    base, rule = find(optimizer)
    _check_patches(optimizer, base)
    for name, expected in rule.attributes.items():
        if (value := getattr(optimizer, name, expected)) != expected:
            raise ValueError(f"{base.__name__}({name}={value!r}) is not supported; only {name}={expected!r} is")
    for group in optimizer.param_groups:
        check_options(optimizer, group)


def rule_of(optimizer: Optimizer) -> UpdateRule:
    """The rule of the optimizer's class or of a parent class. Raises ValueError if there is none."""
    return find(optimizer)[1]


def find(optimizer: Optimizer) -> tuple[type[Optimizer], UpdateRule]:
    """Return the class in the table that the optimizer belongs to, and its rule."""
    kind = type(optimizer)
    if rule := rule_for(kind):
        return kind, rule
    for cls in kind.__mro__:
        if rule := rule_for(cls):
            if overridden := _overridden(kind, cls):
                raise ValueError(
                    f"{kind.__name__} overrides {cls.__name__}.{overridden}, which takes part in the update; register "
                    f"the update of {kind.__name__} with tutti.register_optimizer"
                )
            return cls, rule
        if cls in REFUSED:
            raise ValueError(f"{kind.__name__} is not supported: {REFUSED[cls]}")
    supported = ", ".join([*sorted(cls.__name__ for cls in TABLE), *sorted(NAMED)])
    raise ValueError(
        f"the update of optimizer {kind.__name__} is unknown; supported are {supported}. "
        "Add it with tutti.register_optimizer"
    )


def check_options(optimizer: Optimizer, group: Group) -> None:
    """Raise ValueError for an option of the group that the rule does not honour."""
    base, rule = find(optimizer)
    name = type(optimizer).__name__
    check_marks(group)
    for key, value in group.items():
        if key in WITHOUT_EFFECT or key in rule.options:
            continue
        if key in rule.supports and value == rule.supports[key]:
            continue
        if key in rule.supports:
            raise ValueError(f"{name}({key}={value!r}) is not supported; only {key}={rule.supports[key]!r} is")
        if key in optimizer.defaults and _reads(base, optimizer, key):
            options = ", ".join(sorted(rule.options))
            raise ValueError(
                f"option {key} of {name} is not supported; supported are {options or 'none'} "
                "(`options` of tutti.register_optimizer)"
            )


def _reads(base: type[Optimizer], optimizer: Optimizer, key: str) -> bool:
    """Return whether `base.step` may read an option. It reads none that a subclass adds."""
    return type(optimizer) is base or key in inspect.signature(base.__init__).parameters


def _overridden(kind: type[Optimizer], base: type[Optimizer]) -> str | None:
    """Return a method of `base` that takes part in the update and that `kind` overrides, or None."""
    for cls in kind.__mro__[: kind.__mro__.index(base)]:
        for name, value in vars(cls).items():
            if _takes_part(base, name) and compat.unhooked(value) is not compat.unhooked(getattr(base, name)):
                return name
    return None


def _takes_part(base: type[Optimizer], name: str) -> bool:
    return name not in NO_PART and not name.startswith(("__", "register_")) and callable(getattr(base, name, None))


def _check_patches(optimizer: Optimizer, base: type[Optimizer]) -> None:
    for name, value in vars(optimizer).items():
        if _takes_part(base, name) and not compat.counts_calls(value, getattr(type(optimizer), name)):
            raise ValueError(
                f"{name} of this {type(optimizer).__name__} instance was replaced; the captured update would ignore "
                "the replacement. Subclass the optimizer and register the subclass with tutti.register_optimizer"
            )


def constants_of(optimizer: Optimizer) -> list[Group]:
    """The options that a captured update contains as constants, by parameter group: all but the learning rates."""
    varying = ("params", "lr", "initial_lr")
    return [{k: v for k, v in group.items() if k not in varying} for group in optimizer.param_groups]


def check_constants(then: list[Group], optimizer: Optimizer) -> None:
    """Raise ValueError if an option other than the learning rate has changed: the captured update contains it.

    then: `constants_of` when the step was made.
    """
    check_hooks(optimizer)
    for i, (old, now) in enumerate(zip(then, constants_of(optimizer), strict=True)):
        if changed := [key for key in old if now.get(key) != old[key]]:
            key = changed[0]
            raise ValueError(
                f"{key} of parameter group {i} was {old[key]} when the step was made and is {now.get(key)} now; "
                "only lr may change (OneCycleLR and CyclicLR change momentum, too, without cycle_momentum=False): "
                "call tutti.parallelize again"
            )


def check_hooks(optimizer: Optimizer) -> None:
    """Raise ValueError for a step hook whose effect is not in the captured update."""
    for where, hook in compat.step_hooks(optimizer):
        if getattr(hook, "captured", False):  # does in `step()` what a mark of a group does in the captured update
            continue
        name = getattr(hook, "__qualname__", repr(hook))
        raise ValueError(
            f"{type(optimizer).__name__} has the hook {name} ({where}); a captured update runs no hooks. Remove it, "
            "and call it before or after step(batch)"
        )
