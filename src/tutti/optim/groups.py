"""Parameter groups by patterns of names, layer-wise learning rates, and freezing."""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

LAYER = re.compile(r"^(.*?)\.(\d+)\.")


def groups(
    model: nn.Module,
    patterns: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    lr: float | None = None,
    layer_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups for any optimizer, by patterns of parameter names.

        groups = tutti.optim.groups(model, {"*.bias": {"weight_decay": 0.0}, "head.*": {"lr": 1e-3}}, lr=1e-4,
                                    layer_decay=0.75)
        optimizer = torch.optim.AdamW(groups)

    patterns: shell-style pattern -> options of the parameters whose full name matches it. The first pattern that
        matches a parameter decides. Parameters that none matches come in groups without options of their own.
    lr: learning rate of groups whose pattern gives none.
    layer_decay: multiplies the learning rate once for each layer between a parameter and the head. With n layers (the
        modules of the longest list, such as `encoder.layer.3`), a parameter of layer i has lr layer_decay^(n - i), what
        comes before the layers in the model has lr layer_decay^(n + 1), and what comes after them has lr.

    Each group has "param_names", and with `layer_decay` "lr_scale", the factor that its learning rate has. A loop that
    sets learning rates itself multiplies with it. Parameters that require no gradient are left out.

    Raises ValueError for a pattern that decides about no parameter, and for `layer_decay` without `lr` or without
    layers.

    Clark et al., "ELECTRA: pre-training text encoders as discriminators rather than generators" (2020), for layer-wise
    learning rates.
    """
    patterns, params = dict(patterns or {}), dict(model.named_parameters())
    depths = {} if layer_decay is None else layers_to_head(list(params))
    if layer_decay is not None and lr is None:
        raise ValueError(f"layer_decay={layer_decay} needs lr=, the learning rate that it scales")
    if layer_decay is not None and not 0 < layer_decay <= 1:
        raise ValueError(f"layer_decay is {layer_decay!r}; it must be more than 0 and at most 1")
    group_of: dict[tuple, dict[str, Any]] = {}
    used: set[str] = set()
    for name, p in params.items():
        pattern = next((x for x in patterns if fnmatchcase(name, x)), None)
        used |= {pattern} if pattern is not None else set()
        if not p.requires_grad:
            continue
        key = pattern, depths.get(name)
        if key not in group_of:
            group_of[key] = _options(patterns.get(pattern, {}) if pattern else {}, lr, layer_decay, depths.get(name))
        group_of[key]["params"].append((name, p))
    for pattern in patterns:
        if pattern not in used:
            by_others = any(fnmatchcase(name, pattern) for name in params)
            raise ValueError(f"earlier patterns match all parameters that {pattern!r} matches; put it before them"
                             if by_others else _nothing(pattern, list(params)))  # fmt: skip
    return list(group_of.values())


def freeze(model: nn.Module, *patterns: str) -> list[str]:
    """Set `requires_grad=False` for all parameters whose full name matches a shell-style pattern. Returns their names.

        tutti.optim.freeze(model, "encoder.*", "*.embeddings.*")

    Raises ValueError for a pattern that matches nothing; nothing has changed then.
    """
    params = dict(model.named_parameters())
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in params):
            raise ValueError(_nothing(pattern, list(params)))
    frozen = [name for name in params if any(fnmatchcase(name, pattern) for pattern in patterns)]
    for name in frozen:
        params[name].requires_grad_(False)
    return frozen


def _options(overrides: Mapping[str, Any], lr: float | None, decay: float | None, depth: int | None) -> dict[str, Any]:
    """A group without parameters."""
    options = {"params": [], **({} if lr is None else {"lr": lr}), **overrides}
    if decay is None or depth is None:
        return options
    scale = decay**depth
    return {**options, "lr": options["lr"] * scale, "lr_scale": scale}


def layers_to_head(names: list[str]) -> dict[str, int]:
    """How many layers are between each parameter and the head."""
    indices: dict[str, set[int]] = {}
    numbered = {name: match for name in names if (match := LAYER.match(name))}
    for match in numbered.values():
        indices.setdefault(match[1], set()).add(int(match[2]))
    if not indices:
        raise ValueError("layer_decay needs a model with a list of layers (parameter names such as `layers.3.weight`); "
                         f"this one has {names[:4]} ...")  # fmt: skip
    longest = max(indices, key=lambda path: len(indices[path]))
    order = {index: i for i, index in enumerate(sorted(indices[longest]))}
    first = min(i for i, name in enumerate(names) if name in numbered and numbered[name][1] == longest)
    depths = {}
    for i, name in enumerate(names):
        match = numbered.get(name)
        if match and match[1] == longest:
            depths[name] = len(order) - order[int(match[2])]
        else:
            depths[name] = len(order) + 1 if i < first else 0
    return depths


def _nothing(pattern: str, names: list[str]) -> str:
    stems = {re.sub(r"\.\d+\.", ".*.", name) for name in names} | set(names)
    stems |= {f"{name.rpartition('.')[0]}.*" for name in names if "." in name}
    near = get_close_matches(pattern, sorted(stems), n=1, cutoff=0.0)
    return (
        f"pattern {pattern!r} matches no parameter; the nearest is {near[0]!r}" if near else "there are no parameters"
    )
