"""The options of an algorithm: checked against its `Config`, and those that a file can hold."""

from __future__ import annotations

from dataclasses import fields
from difflib import get_close_matches
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tutti.rl.core import ranges

if TYPE_CHECKING:
    from tutti.rl.core.agent import Agent, Config

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def configured(algorithm: type[Agent], options: dict[str, Any]) -> Config:
    """A config with these options. Raises ValueError for unknown ones, for those that have no effect on the algorithm,
    and for values out of range."""
    kind = algorithm.Config
    names = [f.name for f in fields(kind) if f.name not in algorithm.unused]
    default = {f.name: f.default for f in fields(kind)}
    for name in options:
        if name in algorithm.unused:
            if options[name] != default[name]:
                raise ValueError(f"{name} has no effect on {algorithm.__name__}; leave it out")
        elif name not in names:
            near = get_close_matches(name, names, 1)
            raise ValueError(f"there is no option {name!r}{f'; did you mean {near[0]!r}?' if near else '.'} "
                             f"The options are {', '.join(names)}")  # fmt: skip
    for f in fields(kind):
        if f.name in options and (wants := _misfit(str(f.type), options[f.name])):
            raise ValueError(f"{f.name} is {options[f.name]!r}; it must be {wants}")
    config = kind(**options)
    ranges.check_all(config, names, algorithm.ranges)
    if config.precision not in PRECISIONS:
        raise ValueError(f"precision {config.precision!r} is not one of {', '.join(PRECISIONS)}")
    return config


def _misfit(kind: str, x: Any) -> str | None:
    """Describe the required kind of an option if a value does not match its annotation, else None."""
    kind, *more = kind.removeprefix("agent.").split(" | ")
    number = isinstance(x, Real | Tensor) and not isinstance(x, bool)
    fits, wants = {
        "bool": (isinstance(x, bool), "True or False"),
        "int": (isinstance(x, Integral | Tensor) and not isinstance(x, bool), "a whole number"),
        "float": (number, "a number"),
        "Number": (number, "a number"),
        "Rate": (number or callable(x), "a number, or a function of the remaining progress"),
        "str": (isinstance(x, str), "a text"),
        "tuple[int, ...]": (isinstance(x, tuple | list), "whole numbers in brackets, as in [64, 64]"),
    }.get(kind, (True, ""))
    if fits or ("None" in more and x is None):
        return None
    return f"{wants} or None" if "None" in more else wants


def options_of(config: Config) -> dict[str, Any]:
    """The options of a config that JSON can hold."""
    return {f.name: getattr(config, f.name) for f in fields(config) if _is_plain(getattr(config, f.name))}


def unsaved(config: Config) -> list[str]:
    """The names of the others."""
    return [f.name for f in fields(config) if not _is_plain(getattr(config, f.name))]


def _is_plain(x: Any) -> bool:
    return x is None or isinstance(x, bool | int | float | str) or (
        isinstance(x, tuple | list) and all(map(_is_plain, x)))  # fmt: skip
