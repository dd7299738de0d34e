"""Networks for fields with waves: several scales of the coordinates, each with layers of its own (Z. Liu, W. Cai and
Z.-Q. J. Xu, Commun. Comput. Phys. 28, 1970, 2020), and sines as activations (V. Sitzmann et al., NeurIPS 2020).

Coordinates are functions of no other ones, so a derivative along an axis is one Jacobian-vector product with a constant
tangent, `along`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt

import torch
from torch import Tensor, nn
from torch.func import jvp

from tutti.science.em.bounds import check_whole


class MultiScale(nn.Module):
    """(n, inputs) -> (n, outputs): the sum over scales s of networks of s x, with `layers` hidden layers of `width`.

    omega: factor of the sines of the first layer. residual: whether layers add to what they take.
    """

    scales: Tensor

    def __init__(self, inputs: int, outputs: int, scales: Sequence[float] = (1.0, 2.0, 4.0, 8.0), layers: int = 7,
                 width: int = 64, omega: float = 1.0, residual: bool = True) -> None:  # fmt: skip
        super().__init__()
        check_whole("the network", inputs=inputs, outputs=outputs, layers=layers, width=width, scales=len(scales))
        self.residual = residual
        self.register_buffer("scales", omega * torch.tensor(scales)[:, None, None])
        count = len(scales)

        def values(*shape: int, bound: float) -> nn.Parameter:
            return nn.Parameter((2 * torch.rand(count, *shape) - 1) * bound)

        self.first = values(inputs, width, bound=sqrt(3 / inputs))
        self.hidden = nn.ParameterList(values(width, width, bound=sqrt(6 / width)) for _ in range(layers - 1))
        self.bias = nn.ParameterList(values(1, width, bound=1.0 if i == 0 else 0.1) for i in range(layers))
        self.last = values(width, outputs, bound=sqrt(3 / width / count))
        self.shift = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sin(torch.bmm(x[None] * self.scales, self.first) + self.bias[0])
        for weight, bias in zip(self.hidden, self.bias[1:], strict=True):
            new = torch.sin(torch.bmm(h, weight) + bias)
            h = (h + new) / sqrt(2) if self.residual else new
        return torch.bmm(h, self.last).sum(0) + self.shift


def along(function: Callable[[Tensor], Tensor], x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """A function of points (n, inputs), and its derivative along an axis, both (n, outputs)."""
    tangent = torch.zeros_like(x)
    tangent[:, axis] = 1
    value, derivative, *_ = jvp(function, (x,), (tangent,))
    return value, derivative


def second(function: Callable[[Tensor], Tensor], x: Tensor, axis: int) -> Tensor:
    """The second derivative along an axis: (n, outputs)."""
    return along(lambda y: along(function, y, axis)[1], x, axis)[1]
