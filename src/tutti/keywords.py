"""Misspelt keyword arguments: the error names the nearest argument that there is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def names_nearest(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function without `**kwargs`: an unknown keyword argument is a TypeError that names the nearest one."""
    parameters = inspect.signature(function).parameters

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs:
            if name not in parameters and (near := get_close_matches(name, parameters, 1)):
                callee = function.__qualname__.removesuffix(".__init__")
                raise TypeError(f"{callee}() got an unexpected keyword argument {name!r}; did you mean {near[0]!r}?")
        return function(*args, **kwargs)

    return checked
