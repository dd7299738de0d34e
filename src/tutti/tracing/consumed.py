"""Parameters that have given up their memory. They keep shape, dtype and device, and read as NaN (integers as zero)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Consumed:
    """Parameters of which one element is left in memory, with the strides that they had."""

    def __init__(self) -> None:
        self._strides: dict[nn.Parameter, tuple[int, ...]] = {}

    def take(self, parameter: nn.Parameter) -> None:
        """Free a parameter's memory, unless another tensor shares it."""
        self._strides[parameter] = parameter.stride()
        parameter.data = without_memory(parameter)

    @contextmanager
    def shaped(self) -> Iterator[None]:
        """Give the parameters memory of their strides, without values, to be captured as they were."""
        for p, strides in self._strides.items():
            p.data = torch.empty_strided(p.shape, strides, dtype=p.dtype, device=p.device)
        try:
            yield
        finally:
            for p in self._strides:
                p.data = without_memory(p)


def without_memory(x: torch.Tensor) -> torch.Tensor:
    """A tensor of this shape in which all elements are the same one, NaN or zero."""
    value = float("nan") if x.is_floating_point() or x.is_complex() else 0
    return torch.full((), value, dtype=x.dtype, device=x.device).expand(x.shape)
