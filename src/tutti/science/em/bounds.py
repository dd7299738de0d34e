"""Checks of arguments: one-line errors for values out of range."""

from __future__ import annotations

from math import inf
from typing import Any

from tutti.science.em.shown import brief


def check_whole(what: str, least: int = 1, **numbers: int) -> None:
    """Raises ValueError unless all are whole numbers, `least` or more."""
    for name, x in numbers.items():
        if not hasattr(x, "__index__") or isinstance(x, bool) or x < least:
            raise ValueError(f"{name} of {what}: a whole number from {least}, not {brief(x)}")


def check_number(name: str, x: Any) -> None:
    """Raises ValueError unless `x` is a number."""
    if isinstance(x, str) or not hasattr(x, "__float__") or getattr(x, "ndim", 0):
        raise ValueError(f"{name}: a number, not {brief(x)}")


def check_positive(what: str, **numbers: float) -> None:
    """Raises ValueError unless all are positive and finite."""
    for name, x in numbers.items():
        if isinstance(x, str) or not hasattr(x, "__float__") or not 0 < x < inf:
            raise ValueError(f"{name} of {what}: positive and finite, not {brief(x)}")


def check_kind(what: str, x: Any, kind: type) -> None:
    """Raises ValueError unless `x` is an instance of `kind`."""
    if not isinstance(x, kind):
        raise ValueError(f"{what}: of type {kind.__name__}, not {brief(x)}")
