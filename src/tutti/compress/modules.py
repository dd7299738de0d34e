"""Modules of a model: copies that share tensors, and layers found by patterns."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn


def sharing_copy(model: nn.Module) -> nn.Module:
    """A copy of a model whose modules can be replaced. It shares all tensors."""
    shared = {id(x): x for x in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, dict(shared))


def matches(path: str, pattern: str) -> bool:
    """Whether a pattern such as `*.down_proj`, `lm_head` or `layers.0.*` is of a module's path, or of its end."""
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"*.{pattern}")


def matching(paths: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The paths that one of the patterns is of."""
    return [path for path in paths if any(matches(path, x) for x in patterns)]


def check_patterns(paths: Sequence[str], patterns: Iterable[str], what: str) -> None:
    """Raise ValueError, naming the layers, for a pattern that is of no path."""
    for pattern in patterns:
        if not any(matches(path, pattern) for path in paths):
            kinds = list(dict.fromkeys(".".join("*" if x.isdigit() else x for x in path.split(".")) for path in paths))
            raise ValueError(f"{what} {pattern!r} matches no layer; the layers are {', '.join(kinds)}")
