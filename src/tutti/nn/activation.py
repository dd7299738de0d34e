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
