"""Operators that compute gradients, and have none themselves."""

from __future__ import annotations

import torch


def differentiable_once(function: str, *operators: str) -> None:
    """Let NotImplementedError be raised where a gradient of an operator `tutti::...` is asked for, by which a function
    computes its own; without it torch would warn, and give a wrong one."""

    def refuse(ctx, *grads):
        raise NotImplementedError(f"{function} has no second derivatives")

    for name in operators:
        torch.library.register_autograd(f"tutti::{name}", refuse)
