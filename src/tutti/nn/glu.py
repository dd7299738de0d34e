"""Gated linear units (Shazeer, "GLU variants improve Transformer", 2020): act(gate) * up.

`tutti::glu` is (gate, up) -> y, all of one shape and dtype; `tutti::glu_backward` is (grad, gate, up) -> (grad of gate,
grad of up) and recomputes act(gate). The activations are those of `tutti.nn.activation`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.nn.activation import activation_of
from tutti.nn.dense import register
from tutti.nn.once import differentiable_once

__all__ = ["glu"]

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define("glu(Tensor gate, Tensor up, str activation) -> Tensor")
_library.define("glu_backward(Tensor grad, Tensor gate, Tensor up, str activation) -> (Tensor, Tensor)")
ops = torch.ops.tutti


def glu(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """act(gate) * up, differentiable in both. Raises ValueError for an unknown activation or unequal shapes or
    dtypes."""
    activation_of(activation)
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"glu: gate and up must have one shape and dtype, not {gate.dtype} {tuple(gate.shape)} and "
            f"{up.dtype} {tuple(up.shape)}"
        )
    return ops.glu(gate, up, activation)


def forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """The operator in plain ATen."""
    return activation_of(activation).forward(gate) * up


def backward(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Its gradients in plain ATen."""
    act = activation_of(activation)
    return act.backward(grad * up, gate), grad * act.forward(gate)


register(_library, "glu", forward)
register(_library, "glu_backward", backward)
differentiable_once("glu", "glu_backward")


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx, grad):
    return *ops.glu_backward(grad, *ctx.saved_tensors, ctx.activation), None


torch.library.register_autograd("tutti::glu", _gradients, setup_context=_save)
