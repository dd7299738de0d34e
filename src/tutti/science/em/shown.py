"""Short representations: shapes and ranges in place of the numbers of tensors.

>>> import torch
>>> brief({"a": torch.zeros(3, 2), "b": torch.tensor([0.5, 1e9]), "c": tuple(range(100))})
'{a: float32 (3, 2) from 0 to 0, b: [0.5, 1e+09], c: 100 numbers from 0 to 99}'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from reprlib import Repr
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

FEW = 4  # numbers
SHORT = Repr()
SHORT.maxother = SHORT.maxstring = 100


def brief(x: Any) -> str:
    """One line for a value of any kind."""
    if isinstance(x, Tensor | np.ndarray):
        few = x.ndim == 0 or (x.ndim == 1 and len(x) <= FEW)
        return brief(x.tolist()) if few else f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}{_range(x)}"
    if isinstance(x, list | tuple) and len(x) > FEW and all(isinstance(each, int | float) for each in x):
        return f"{len(x)} numbers from {min(x):.6g} to {max(x):.6g}"
    if isinstance(x, list):
        return "[" + ", ".join(map(brief, x[:FEW])) + (", ..." if len(x) > FEW else "") + "]"
    if isinstance(x, Mapping):
        return "{" + ", ".join(f"{name}: {brief(value)}" for name, value in x.items()) + "}"
    if isinstance(x, float):
        return f"{x:.6g}"
    if type(x).__repr__ is object.__repr__:
        return type(x).__name__
    return repr(x) if isinstance(x, Brief) else SHORT.repr(x)


def _range(x: Tensor | np.ndarray) -> str:
    """The range of the finite numbers, or of their magnitudes if they are complex, as text."""
    if isinstance(x, np.ndarray) and x.dtype.kind not in "biufc":
        return ""
    values = torch.as_tensor(x).detach()
    values, where = (values.abs(), "magnitudes ") if values.is_complex() else (values, "")
    values = values[values.isfinite()]
    return f" {where}from {float(values.min()):.4g} to {float(values.max()):.4g}" if values.numel() else ""


class Brief:
    """For dataclasses with `repr=False`: fields by name, tensors by type, shape and range. leading: properties to show
    before them."""

    leading: ClassVar[tuple[str, ...]] = ()

    def __repr__(self) -> str:
        names = [*self.leading, *(x.name for x in fields(self) if x.repr)]  # pyright: ignore[reportArgumentType]
        return f"{type(self).__name__}({', '.join(f'{name}={brief(getattr(self, name))}' for name in names)})"
