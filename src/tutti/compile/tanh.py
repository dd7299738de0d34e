"""Hyperbolic tangent for compiled code: a rational function, which Inductor vectorizes and fuses.

Inductor calls the Sleef library for vectors, at a cost per element above that of a small network's matrix products. With
u = x^2 and x clamped to [-8, 8],

    tanh(x) = x (a0 + a1 u + ... + a4 u^4) / (1 + b1 u + ... + b4 u^4)

has a relative error of 3.1e-7 in float32. The coefficients minimize the largest relative error, 6.5e-9 in exact
arithmetic (Lawson's iteration). Values are below 1, so that log(1 - tanh(x)^2) is finite.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LIMIT = 8.0
ABOVE = (0.9999999935703727, 0.1344450266539936, 3.5716036292257705e-3, 2.189475615311233e-5, 1.5230552899713115e-8)
BELOW = (1.0, 0.4677782998558088, 2.6164464152200657e-2, 3.411301263306227e-4, 8.522500907927069e-7)


def tanh(x: Tensor) -> Any:
    """tanh of float32 on a CPU; NotImplemented for other tensors, which keep their kernel."""
    if x.dtype != torch.float32 or x.device.type != "cpu":
        return NotImplemented
    x = x.clamp(-LIMIT, LIMIT)
    u = x * x
    return x * (_polynomial(ABOVE, u) / _polynomial(BELOW, u))


def _polynomial(coefficients: tuple[float, ...], u: Tensor) -> Tensor:
    *rest, last = coefficients
    total = last * u + rest.pop()
    while rest:
        total = total * u + rest.pop()
    return total


DECOMPOSITIONS = {torch.ops.aten.tanh.default: tanh}
