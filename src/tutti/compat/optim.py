"""Hooks and counters of optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Mark the optimizer as stepped, so that learning-rate schedulers do not warn."""
    optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]


def step_hooks(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Callable]]:
    """The hooks that `optimizer.step()` runs, each with the function that registered it.

    The hook of torch.profiler is left out: it only counts steps.
    """
    every = (
        ("register_optimizer_step_pre_hook", _global_optimizer_pre_hooks),
        ("register_optimizer_step_post_hook", _global_optimizer_post_hooks),
        ("register_step_pre_hook", optimizer._optimizer_step_pre_hooks),
        ("register_step_post_hook", optimizer._optimizer_step_post_hooks),
    )
    for registered_by, hooks in every:
        yield from ((registered_by, x) for x in hooks.values() if getattr(x, "__module__", "") != "torch.profiler")


def unhooked(method: Any) -> Any:
    """A step method without the wrapper that runs hooks, which torch installs in the class at its first instance."""
    return method.__wrapped__ if getattr(method, "__code__", None) is _RUNS_HOOKS else method


_RUNS_HOOKS = torch.optim.Optimizer.profile_hook_step(lambda self: None).__code__


def counts_calls(method: Any, of: Any) -> bool:
    """Whether `method` is `of`, a method of an optimizer class, wrapped by a learning-rate scheduler."""
    return hasattr(method, "_wrapped_by_lr_sched") and unhooked(method.__wrapped__) is unhooked(of)
