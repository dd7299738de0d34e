"""Autograd's graph and hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def is_custom(grad_fn: Any) -> bool:
    """Whether an autograd node belongs to a `torch.autograd.Function`."""
    return isinstance(grad_fn, torch.autograd.function.BackwardCFunction)


def hooks_on(parameter: torch.Tensor) -> tuple[list[Callable], list[Callable]]:
    """The hooks on a tensor's gradient: those of `register_hook`, and of `register_post_accumulate_grad_hook`."""
    hook_dicts = parameter._backward_hooks, parameter._post_accumulate_grad_hooks  # pyright: ignore
    before, after = (list(hooks.values()) if hooks else [] for hooks in hook_dicts)
    return before, after


def autograd_clock() -> int:
    """The sequence number that the next autograd node will get."""
    return torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]


def born_at(grad_fn) -> int:
    """The sequence number that `grad_fn` got when the forward pass made it."""
    return grad_fn._sequence_nr()


def in_backward_order(root) -> list:
    """All autograd nodes that the backward pass from `root` can reach, each once."""
    seen, stack = {root}, [root]
    while stack:
        for parent, _ in stack.pop().next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                stack.append(parent)
    return list(seen)
