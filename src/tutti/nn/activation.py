"""Activation functions by name, each with its gradient, for fused operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten


class Activation(NamedTuple):
    """forward(input) and backward(gradient, input)."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


ACTIVATIONS = {
    "silu": Activation(aten.silu.default, aten.silu_backward.default),
    "gelu": Activation(aten.gelu.default, aten.gelu_backward.default),
    "gelu_tanh": Activation(
        lambda x: aten.gelu(x, approximate="tanh"), lambda g, x: aten.gelu_backward(g, x, approximate="tanh")
    ),
    "relu": Activation(aten.relu.default, lambda g, x: aten.threshold_backward(g, x, 0)),
    "relu2": Activation(
        lambda x: aten.relu(x).square(), lambda g, x: 2 * g * aten.relu(x)
    ),  # So et al., "Primer" (2021)
}


def activation_of(name: str) -> Activation:
    """The activation of this name. Raises ValueError for an unknown one."""
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r}; expected one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def gated(act: Activation, rows: Tensor, width: int) -> Tensor:
    """act(gate) * up (n, width), for rows with gate and up side by side (n, 2 width); or act(up) for rows of up
    alone."""
    gate = act.forward(rows[:, :width])
    return gate.mul_(rows[:, width:]) if rows.shape[1] > width else gate


def gated_backward(act: Activation, rows: Tensor, gate: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the rows, given that of `gated`, which is overwritten. gate: the activated first half."""
    width = gate.shape[1]
    if rows.shape[1] == width:
        return act.backward(grad, rows)
    found = torch.empty_like(rows)
    torch.mul(grad, gate, out=found[:, width:])
    found[:, :width] = act.backward(grad.mul_(rows[:, width:]), rows[:, :width])
    return found
