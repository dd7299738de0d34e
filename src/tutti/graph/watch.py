"""Python state of a model that its forward pass may read: noticed where it changes after a step was captured.

Watched are attributes of modules, and of the plain objects that modules hold (a config), whose values are numbers,
strings, booleans, None or short tuples and lists of these; which plain tensors modules hold, and whether these are
written; modes, hooks and submodules; and which parameters there are and learn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tutti import compat
from tutti.graph.snapshot import LARGEST, MISSING, OPAQUE, is_of_the_system, join

PLAIN = (bool, int, float, str, bytes, complex, type(None), torch.dtype, torch.device)
SHORT = 32  # items of a list that is watched
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
TABLES = ("_parameters", "_buffers", "_modules", *HOOKS)
DEEPEST = 3  # objects within objects that are watched


class Watch:
    """The state of a model at the moment when it was made. attributes: paths of tensors that are state of the step."""

    def __init__(self, model: nn.Module, attributes: frozenset[str] = frozenset()):
        self.model = model
        self.values: list[tuple[dict[str, Any], str, Any, str]] = []  # where, key, value, path
        self.sequences: list[tuple[list, list, str]] = []
        self.tensors: list[tuple[dict[str, Any], str, torch.Tensor, int, str]] = []  # with their versions
        self.sizes: list[tuple[dict, int, str]] = []  # how many attributes there are
        self.hooks: list[tuple[dict[int, Any], list[int], str]] = []  # tables and their keys
        self.children: list[tuple[dict[str, Any], list, str]] = []  # tables and their modules
        seen: set[int] = set()
        for path, module in model.named_modules():
            tables = [(module.__dict__[name], join(path, name)) for name in HOOKS]
            self.hooks += [(table, list(table), name) for table, name in tables]
            self.children.append((module._modules, list(module._modules.values()), path))
            for at, held in self._tables(path, module.__dict__, seen, DEEPEST):
                self.sizes.append((held, len(held), at))
                for key, value in held.items():
                    self._watch(held, key, value, join(at, key), attributes)
        self.learning = _learning(model)

    def _tables(self, path: str, held: dict, seen: set[int], depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """The attributes of a module, and of the plain objects and dicts that it holds."""
        yield path, held
        for key, x in held.items() if depth else ():
            if key in TABLES or isinstance(x, (*OPAQUE, nn.Module, list, set, tuple)) or is_of_the_system(x):
                continue
            inner: Any = x if isinstance(x, dict) else getattr(x, "__dict__", None)
            if isinstance(inner, dict) and id(x) not in seen and len(inner) <= LARGEST:
                seen.add(id(x))
                yield from self._tables(join(path, str(key)), inner, seen, depth - 1)

    def _watch(self, held: dict[str, Any], key: str, value: Any, path: str, attributes: frozenset[str]) -> None:
        if isinstance(value, PLAIN) or (isinstance(value, tuple) and all(isinstance(x, PLAIN) for x in value)):
            self.values.append((held, key, value, path))
        elif isinstance(value, list) and len(value) <= SHORT and all(isinstance(x, PLAIN) for x in value):
            self.values.append((held, key, value, path))
            self.sequences.append((value, list(value), path))
        elif isinstance(value, torch.Tensor) and path not in attributes:
            self.tensors.append((held, key, value, value._version, path))

    def state(self) -> tuple[tuple[str, Any], ...]:
        """What differs from then: (path, value now). Hashable; () where nothing does."""
        found: list[tuple[str, Any]] = []
        for held, key, value, path in self.values:
            now = held.get(key, MISSING)
            if now is not value and (type(now) is not type(value) or now != value):
                found.append((path, now if isinstance(now, (*PLAIN, tuple)) else repr(now)))
        for sequence, value, path in self.sequences:
            if sequence != value:
                found.append((path, tuple(sequence)))
        for held, key, tensor, version, path in self.tensors:
            now = held.get(key, MISSING)
            if now is not tensor or tensor._version != version:
                found.append((path, (Same(now), getattr(now, "_version", 0))))
        found += [(f"the attributes of {path}", len(held)) for held, size, path in self.sizes if len(held) != size]
        found += [(path, tuple(table)) for table, keys, path in self.hooks if list(table) != keys]
        for table, modules, path in self.children:
            now = list(table.values())
            if len(now) != len(modules) or any(a is not b for a, b in zip(now, modules, strict=True)):
                found.append((path, tuple(map(Same, now))))
        return tuple(found)

    @property
    def learns_otherwise(self) -> bool:
        """Whether the model has other parameters than then, or others of them learn."""
        return _learning(self.model) != self.learning


class Same:
    """An object that equals itself alone; held, so that no other one gets its identity."""

    def __init__(self, held: Any):
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)

    def __repr__(self) -> str:
        return f"another {type(self.held).__name__}"


def _learning(model: nn.Module) -> list[tuple[str, int, bool, int]]:
    """Parameters and buffers by name, which of them learn, and how many hooks their gradients have."""
    found = [(name, id(p), p.requires_grad, sum(map(len, compat.hooks_on(p)))) for name, p in model.named_parameters()]
    return [*found, *((name, id(b), False, 0) for name, b in model.named_buffers())]
