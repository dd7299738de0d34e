"""A short `repr` of dataclasses that hold tensors: shapes and ranges instead of numbers."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import Tensor

FEW = 4  # numbers of a tuple that are all shown


def shown(x: Any, *more: str) -> str:
    """Of a dataclass; more: names of properties to show first.

    >>> from tutti.science.em.mt.mesh import Mesh2D
    >>> Mesh2D(range(-500, 600, 100), [0, 10, 20])
    Mesh2D(shape=(2, 10), x_edges=11 from -500 to 500, z_edges=(0.0, 10.0, 20.0))
    """
    names = [*more, *(field.name for field in fields(x) if field.repr)]
    return f"{type(x).__name__}({', '.join(f'{name}={_value(getattr(x, name))}' for name in names)})"


def _value(x: Any) -> str:
    if isinstance(x, Tensor):
        finite = x[x.isfinite()].abs() if x.is_complex() else x[x.isfinite()]
        sizes = f" from {float(finite.min()):.4g} to {float(finite.max()):.4g}" if finite.numel() else ""
        return f"{tuple(x.shape)}{sizes}"
    if isinstance(x, tuple) and len(x) > FEW and all(isinstance(each, int | float) for each in x):
        return f"{len(x)} from {min(x):.6g} to {max(x):.6g}"
    if isinstance(x, float):
        return f"{x:.4g}"
    return type(x).__name__ if type(x).__repr__ is object.__repr__ else repr(x)
