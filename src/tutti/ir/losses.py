"""Losses whose gradients can be computed together with them."""

from __future__ import annotations

import operator

import torch

import tutti.nn.loss.linear_cross_entropy  # noqa: F401  (registers the operators)
from tutti.ir.step_graph import Call, ancestors

ops = torch.ops.tutti


def made_with(forward: Call) -> Call | None:
    """The call that computes the gradients of a linear layer's cross-entropy, if its other operands do not depend on
    the loss, else None."""
    for part in forward.users if forward.target is ops.linear_logsumexp.default else ():
        for user in part.users if part.target is operator.getitem else ():
            if user.target is ops.linear_logsumexp_backward.default and user.args[2:-2] == forward.args:
                return None if forward in ancestors(user.args[:2]) else user  # pyright: ignore
    return None
