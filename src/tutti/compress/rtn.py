"""Round to nearest: codes = round(W / scale) + zero, with the scales that just cover the range of each group."""

from __future__ import annotations

from torch import Tensor

from tutti.nn.scheme import Parts, Scheme


def quantize(weight: Tensor, scheme: Scheme) -> Parts:
    """The nearest quantized weight of (n, k)."""
    return scheme.quantize(weight)
