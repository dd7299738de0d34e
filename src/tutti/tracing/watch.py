"""Detect changes of Python state that a model's forward pass or its loss may read, after a step was captured.

Watched are attributes of modules and their classes, of plain objects in modules (a config), and of what the loss refers
to (a module, a callable object, closures); and global variables named by methods of the model and by the loss. Their
values are watched if they are numbers, strings, booleans, None, or short tuples and lists of these. Also watched are
plain tensors in modules, and writes to them; modes, hooks and submodules; and which parameters there are and require
gradients.
"""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator, Set
from functools import lru_cache
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from tutti import compat
from tutti.tracing.snapshot import LARGEST, MISSING, OPAQUE, is_library, is_of_the_system, join, variables

PLAIN = (bool, int, float, str, bytes, complex, type(None), torch.dtype, torch.device)
SHORT = 32  # maximum items of a watched list
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
TABLES = ("_parameters", "_buffers", "_modules", *HOOKS)
DEEPEST = 3  # maximum depth of watched objects


class Watch:
    """The state of a model, and of functions and objects that use it, when the Watch was created.

    attributes: paths of tensors that are state of the step. state: other tensors that are.
    """

    def __init__(self, model: nn.Module, attributes: frozenset[str] = frozenset(), users: Iterable[Any] = (),
                 state: Iterable[torch.Tensor] = ()):  # fmt: skip
        self.model = model
        self.stored = {id(x) for x in (*model.parameters(), *model.buffers(), *state)}  # which a step reads anew
        self.values: list[tuple[dict[str, Any], str, Any, str]] = []  # where, key, value, path
        self.sequences: list[tuple[list, list, str]] = []
        self.tensors: list[tuple[dict[str, Any], str, torch.Tensor, int, str]] = []  # with their versions
        self.sizes: list[tuple[dict, int, str]] = []  # numbers of attributes
        self.hooks: list[tuple[dict[int, Any], list[int], str]] = []  # tables and their keys
        self.children: list[tuple[dict[str, Any], list, str]] = []  # tables and their modules
        seen: set[int] = set()
        self._watch_users([*users, *dict.fromkeys(map(type, model.modules()))], model, seen)
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
        """The attributes of a module, and of the plain objects and dicts in it."""
        yield path, held
        for key, x in held.items() if depth else ():
            if key in TABLES or isinstance(x, (*OPAQUE, nn.Module, list, set, tuple)) or is_of_the_system(x):
                continue
            inner: Any = x if isinstance(x, dict) else getattr(x, "__dict__", None)
            if is_plain_dict(inner) and id(x) not in seen and len(inner) <= LARGEST:
                seen.add(id(x))
                yield from self._tables(join(path, str(key)), inner, seen, depth - 1)

    def _watch_users(self, users: list[Any], model: nn.Module, seen: set[int]) -> None:
        """Watch the references of functions, callable objects and classes, and the global variables that they name."""
        inside = {id(module) for module in model.modules()}
        known: set[int] = set()
        while users:
            x = users.pop()
            if id(x) in known or id(x) in inside:
                continue
            known.add(id(x))
            if isinstance(x, MethodType):
                users += [x.__self__, x.__func__]
            elif isinstance(x, FunctionType):
                cells = zip(x.__code__.co_freevars, x.__closure__ or (), strict=True)
                self._watch_all(x.__qualname__, {name: Cell(cell) for name, cell in cells}, seen, users)
                if not is_library(str(x.__module__)):
                    names, attributes = names_of_globals(x.__code__), _attributes(x.__code__)
                    for held in [x.__globals__, *_modules(names, x.__globals__)]:
                        names = names if held is x.__globals__ else attributes
                        self._watch_all(
                            str(held.get("__name__", x.__module__)),
                            dict.fromkeys(names & held.keys(), held),
                            seen,
                            users,
                        )
            elif isinstance(x, type):
                for base in [base for base in x.__mro__ if not is_library(base.__module__)]:
                    self._watch_all(base.__qualname__, dict.fromkeys(variables(base.__dict__), base.__dict__), seen, [])
                    users += [f for f in vars(base).values() if isinstance(f, FunctionType)]
            elif isinstance(x, nn.Module):  # a criterion
                for path, module in x.named_modules():
                    own = {k: v for k, v in vars(module).items() if k not in TABLES}
                    self._watch_all(path or type(x).__name__, dict.fromkeys(own, vars(module)), seen, [])
                    users.append(type(module))
            elif hasattr(x, "__dict__") and not isinstance(x, OPAQUE) and not is_of_the_system(x):
                self._watch_all(type(x).__name__, dict.fromkeys(vars(x), vars(x)), seen, users)
                users.append(type(x))

    def _watch_all(self, path: str, holders: dict[str, Any], seen: set[int], users: list[Any]) -> None:
        """Watch some entries, each in its container. Modules and functions among them are added to `users`."""
        for key, holder in holders.items():
            value, at = holder.get(key, MISSING), join(path, key)
            if isinstance(value, (nn.Module, FunctionType, MethodType)):
                if not is_library(str(getattr(value, "__module__", ""))) or isinstance(value, nn.Module):
                    users.append(value)
                if isinstance(value, nn.Module):
                    self.values.append((holder, key, value, at))
                continue
            self._watch(holder, key, value, at, frozenset())
            inner: Any = value if isinstance(value, dict) else getattr(value, "__dict__", None)
            opaque = isinstance(value, (*OPAQUE, torch.optim.Optimizer)) or is_of_the_system(value)
            if (
                is_plain_dict(inner)
                and (inner is value or not opaque)
                and id(value) not in seen
                and len(inner) <= LARGEST
            ):
                seen.add(id(value))
                for where, held in self._tables(at, inner, seen, DEEPEST - 1):
                    for k, item in held.items():
                        self._watch(held, k, item, join(where, str(k)), frozenset())

    def _watch(self, held: Any, key: str, value: Any, path: str, attributes: frozenset[str]) -> None:
        if isinstance(value, PLAIN) or (isinstance(value, tuple) and all(isinstance(x, PLAIN) for x in value)):
            self.values.append((held, key, value, path))
        elif isinstance(value, list) and len(value) <= SHORT and all(isinstance(x, PLAIN) for x in value):
            self.values.append((held, key, value, path))
            self.sequences.append((value, list(value), path))
        elif isinstance(value, torch.Tensor) and path not in attributes and id(value) not in self.stored:
            self.tensors.append((held, key, value, value._version, path))

    def state(self) -> tuple[tuple[str, Any], ...]:
        """The differences: (path, value now). Hashable; () if there are none."""
        found: list[tuple[str, Any]] = []
        for held, key, value, path in self.values:
            now = held.get(key, MISSING)
            if now is not value and (type(now) is not type(value) or now != value):
                found.append((path, now if isinstance(now, (*PLAIN, tuple)) else Same(now)))
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
        """Whether the model's parameters, or which of them require gradients, have changed."""
        return _learning(self.model) != self.learning


def is_plain_dict(x: Any) -> bool:
    """Whether this is a dict without overridden access methods."""
    return isinstance(x, dict) and type(x).get is dict.get and type(x).__getitem__ is dict.__getitem__


class Cell:
    """A closure's variable, as a dict of one entry."""

    def __init__(self, cell: CellType):
        self.cell = cell

    def get(self, key: str, default: Any) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:  # the variable is not assigned yet
            return default


@lru_cache(1 << 14)  # each capture visits the code of all classes of the model and their bases
def names_of_globals(code: CodeType) -> frozenset[str]:
    """The global names used by code and by functions within it."""
    inner = (x for x in code.co_consts if isinstance(x, CodeType))
    own = frozenset(x.argval for x in dis.get_instructions(code) if x.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return own.union(*map(names_of_globals, inner))


@lru_cache(1 << 14)
def _attributes(code: CodeType) -> frozenset[str]:
    """The names of attributes and globals used by code."""
    inner = (x for x in code.co_consts if isinstance(x, CodeType))
    return frozenset(code.co_names).union(*map(_attributes, inner))


def _modules(names: Set[str], held: dict[str, Any]) -> list[dict[str, Any]]:
    """The variables of imported files, such as one with settings, named by code."""
    found = [held[name] for name in names & held.keys() if isinstance(held[name], ModuleType)]
    return [vars(module) for module in found if not is_library(module.__name__)]


class Same:
    """An object compared by identity. It is kept alive, so that its id stays unique."""

    def __init__(self, held: Any):
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)

    def __repr__(self) -> str:
        return f"another {type(self.held).__name__}"


def _learning(model: nn.Module) -> list[tuple[str, int, bool, int]]:
    """Parameters and buffers by name, whether each requires gradients, and the number of hooks on its gradient."""
    found = [(name, id(p), p.requires_grad, sum(map(len, compat.hooks_on(p)))) for name, p in model.named_parameters()]
    return [*found, *((name, id(b), False, 0) for name, b in model.named_buffers())]
