"""Operators without second derivatives."""

from __future__ import annotations

import torch


def differentiable_once(function: str, *operators: str) -> None:
    """Make `tutti::...` operators, which compute the gradients of a function, raise NotImplementedError when they are
    differentiated. torch would only warn, and return a wrong gradient."""

    def refuse(ctx, *grads):
        raise NotImplementedError(f"{function} has first derivatives only")

    for name in operators:
        torch.library.register_autograd(f"tutti::{name}", refuse)
