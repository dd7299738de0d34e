"""The shape and dtype of a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of a tensor. `str(spec)` is for instance `float32[4, 8]`."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    @staticmethod
    def of(value: Any) -> Any:
        """The `Spec` of a tensor, a tuple of Specs for a tuple or list of tensors, None for anything else."""
        if isinstance(value, torch.Tensor):
            return Spec(tuple(value.shape), value.dtype)
        if isinstance(value, (tuple, list)):
            return tuple(Spec.of(v) for v in value)
        return None
