"""Modules of a model: copies that share tensors, and layers found by patterns."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from tutti.compress.experts import check_experts, is_experts


def sharing_copy(model: nn.Module) -> nn.Module:
    """A copy of a model whose modules can be replaced. It shares all tensors."""
    shared = {id(x): x for x in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, dict(shared))


def own_copy(model: nn.Module) -> nn.Module:
    """A copy of a model with parameters of its own, in the memory of the model's. Ties stay."""
    own = {id(x): nn.Parameter(x.detach(), requires_grad=False) for x in model.parameters()}
    return copy.deepcopy(model, {**own, **{id(x): x for x in model.buffers()}})


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


def selected(paths: Sequence[str], layers: Sequence[str], ignore: Sequence[str]) -> list[str]:
    """The paths that `layers` match and `ignore` does not. Raises ValueError for a pattern that is of no path; the
    output layer `lm_head` may be ignored where there is none."""
    check_patterns(paths, layers, "layers")
    check_patterns(paths, [x for x in ignore if x != "lm_head"], "ignore")
    ignored = {*matching(paths, ignore)}
    return [path for path in matching(paths, layers) if path not in ignored]


def linear_layers(module: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of a module, by path."""
    return {path: x for path, x in module.named_modules() if type(x) is nn.Linear}


def shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """The shapes (n, k) of the weights of all linear layers, by path, those of experts among them."""
    sizes = {path: (x.out_features, x.in_features) for path, x in linear_layers(model).items()}
    for path, x in model.named_modules():
        if is_experts(x):
            experts: Any = x
            check_experts(x)
            both, down = experts.gate_up_proj.shape[1:], experts.down_proj.shape[1:]
            (n, k), (out, inner) = (both[::-1], down[::-1]) if experts.is_transposed else (both, down)
            for e in range(experts.num_experts):
                sizes |= {f"{path}.{e}.{name}": (n // 2, k) for name in ("gate_proj", "up_proj")}
                sizes[f"{path}.{e}.down_proj"] = out, inner
    return sizes
