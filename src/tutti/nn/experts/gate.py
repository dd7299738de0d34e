"""Gates of feed-forward layers: from the rows of the first product to the operand of the second, with gradients.

| name | rows | result |
|---|---|---|
| an activation of `tutti.nn.activation` | gate and up side by side (n, 2 width) | act(gate) * up |
| the same | up alone (n, width) | act(up) |
| `clamped_swiglu:ALPHA:LIMIT` | gate and up in turns (n, 2 width) | (up + 1) * gate * sigmoid(ALPHA * gate) |

`clamped_swiglu` is the gate of gpt-oss (arXiv 2508.10925): gate is at most LIMIT, up between -LIMIT and LIMIT.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tutti.nn.activation import ACTIVATIONS, Activation, activation_of

CLAMPED = "clamped_swiglu"


@dataclass(frozen=True)
class Halves:
    """An activated half, times the other half if there is one."""

    act: Activation
    interleaved: ClassVar[bool] = False

    def forward(self, rows: Tensor, width: int) -> Tensor:
        """The result of shape (n, width)."""
        gate = self.act.forward(rows[:, :width])
        return gate.mul_(rows[:, width:]) if rows.shape[1] > width else gate

    def forward_saving(self, rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The result, and what `backward` reads of it: the activated half."""
        gate = self.act.forward(rows[:, :width])
        return (gate * rows[:, width:] if rows.shape[1] > width else gate), gate

    def backward(self, rows: Tensor, gate: Tensor, grad: Tensor) -> Tensor:
        """The gradient of the rows, given that of the result, which is overwritten."""
        width = gate.shape[1]
        if rows.shape[1] == width:
            return self.act.backward(grad, rows)
        gradient = torch.empty_like(rows)
        torch.mul(grad, gate, out=gradient[:, width:])
        gradient[:, :width] = self.act.backward(grad.mul_(rows[:, width:]), rows[:, :width])
        return gradient


@dataclass(frozen=True)
class Clamped:
    """The gate of gpt-oss."""

    alpha: float
    limit: float
    interleaved: ClassVar[bool] = True

    def forward(self, rows: Tensor, width: int) -> Tensor:
        """The result of shape (n, width)."""
        return self.forward_saving(rows, width)[0]

    def forward_saving(self, rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The result, and what `backward` reads of it: the activated gate."""
        gate = rows[:, ::2].clamp(max=self.limit)
        active = gate * torch.sigmoid(self.alpha * gate)
        return (rows[:, 1::2].clamp(-self.limit, self.limit) + 1) * active, active

    def backward(self, rows: Tensor, active: Tensor, grad: Tensor) -> Tensor:
        """The gradient of the rows, given that of the result."""
        gate, up, limit = rows[:, ::2].clamp(max=self.limit), rows[:, 1::2], self.limit
        share = torch.sigmoid(self.alpha * gate)
        slope = share * (1 + self.alpha * gate * (1 - share))
        gradient = torch.empty_like(rows)
        gradient[:, ::2] = grad * (up.clamp(-limit, limit) + 1) * slope * (rows[:, ::2] <= limit)
        gradient[:, 1::2] = grad * active * (up.abs() <= limit)
        return gradient


def gate_of(name: str) -> Halves | Clamped:
    """The gate of this name. Raises ValueError for an unknown one."""
    kind, *numbers = name.split(":")
    if kind == CLAMPED and len(numbers) == 2:
        return Clamped(*map(float, numbers))
    if name not in ACTIVATIONS:
        expected = f"{', '.join(ACTIVATIONS)} or {CLAMPED}:ALPHA:LIMIT"
        raise ValueError(f"unknown activation {name!r}; expected one of {expected}")
    return Halves(activation_of(name))
