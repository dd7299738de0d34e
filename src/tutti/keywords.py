"""Misspelt names of arguments and keys: the error names the nearest one that there is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
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


def check_name(name: str, names: Iterable[str], what: str) -> None:
    """Raise ValueError for a name that is none of `names`: `what`, and the nearest one, or all of them.

    >>> check_name("betta", ["beta", "seed"], "there is no key 'betta'")
    Traceback (most recent call last):
    ValueError: there is no key 'betta'; did you mean 'beta'?
    """
    names = list(names)
    if name not in names:
        near = get_close_matches(name, names, 1)
        raise ValueError(f"{what}; {f'did you mean {near[0]!r}?' if near else 'there are ' + ', '.join(names)}")
