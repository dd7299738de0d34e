"""Short representations: types and shapes in place of the numbers of tensors.

>>> import torch
>>> brief({"a": torch.zeros(3, 2), "b": torch.tensor([0.5, 1e9])})
'{a: float32 (3, 2), b: [0.5, 1e+09]}'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from reprlib import Repr
from typing import Any

import numpy as np
from torch import Tensor

FEW = 4  # numbers
SHORT = Repr()
SHORT.maxother = SHORT.maxstring = 100


def brief(x: Any) -> str:
    """One line for a value of any kind."""
    if isinstance(x, Tensor | np.ndarray):
        few = x.ndim == 0 or (x.ndim == 1 and len(x) <= FEW)
        return brief(x.tolist()) if few else f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
    if isinstance(x, list):
        return "[" + ", ".join(map(brief, x[:FEW])) + (", ..." if len(x) > FEW else "") + "]"
    if isinstance(x, Mapping):
        return "{" + ", ".join(f"{name}: {brief(value)}" for name, value in x.items()) + "}"
    if isinstance(x, float):
        return f"{x:.6g}"
    return repr(x) if isinstance(x, Brief) else SHORT.repr(x)


class Brief:
    """For dataclasses with `repr=False`: fields by name, tensors by type and shape."""

    def __repr__(self) -> str:
        told = ", ".join(f"{x.name}={brief(getattr(self, x.name))}" for x in fields(self) if x.repr)  # pyright: ignore
        return f"{type(self).__name__}({told})"
