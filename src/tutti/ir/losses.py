"""Losses whose gradients can be made along with them."""

from __future__ import annotations

import operator

import torch

import tutti.nn.linear_cross_entropy  # noqa: F401  (registers the operators)
from tutti.ir.step_graph import Call, ancestors

ops = torch.ops.tutti


def made_with(forward: Call) -> Call | None:
    """The call that makes the gradients of a linear layer's cross-entropy, where what it is given besides does not
    depend on the loss."""
    for part in forward.users if forward.target is ops.linear_logsumexp.default else ():
        for user in part.users if part.target is operator.getitem else ():
            if user.target is ops.linear_logsumexp_backward.default and user.args[2:-2] == forward.args:
                return None if forward in ancestors(user.args[:2]) else user  # pyright: ignore
    return None
