"""An ensemble of residual networks as one module: all members train in one step, on weights of samples of their own."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor, nn


class Linear(nn.Module):
    """A linear layer per member: (members, n, inputs) -> (members, n, outputs)."""

    def __init__(self, members: int, inputs: int, outputs: int, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(gain * torch.randn(members, inputs, outputs) / sqrt(inputs))
        self.bias = nn.Parameter(gain * (2 * torch.rand(members, 1, outputs) - 1) / sqrt(inputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x, self.weight)


class Ensemble(nn.Module):
    """`members` networks from unit parameters to coefficients of curves.

    weight: weights of coefficients in the loss (outputs,), whose sum is 1.
    """

    weight: Tensor

    def __init__(self, members: int, inputs: int, weight: Tensor, width: int = 128, blocks: int = 2) -> None:
        super().__init__()
        self.members = members
        self.first = Linear(members, inputs, width, 1.5)
        self.blocks = nn.ModuleList(Linear(members, width, width) for _ in range(2 * blocks))
        self.last = Linear(members, width, len(weight))
        self.register_buffer("weight", weight.float())

    def coefficients(self, parameters: Tensor) -> Tensor:
        """(n, inputs) -> (members, n, outputs)."""
        x = self.first(parameters[None].expand(self.members, -1, -1))
        for one, two in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            x = x + two(nn.functional.silu(one(nn.functional.silu(x))))
        return self.last(nn.functional.silu(x))

    def forward(self, parameters: Tensor, labels: Tensor, counts: Tensor) -> dict[str, Tensor]:
        """The mean over members of the squared error of curves, over their variance.

        labels: coefficients (n, outputs). counts: how often each member has a sample (n, members).
        """
        error = (self.coefficients(parameters) - labels).square() @ self.weight
        return {"loss": (error * counts.T).mean()}
