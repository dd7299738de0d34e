"""Detect changes of Python state that a model's forward pass or its loss may read, after a step was captured.

Watched are attributes of modules and their classes, of plain objects in modules (a config), and of what the loss refers
to (a module, a callable object, closures); and global variables named by methods of the model and by the loss. Their
values are watched if they are numbers, strings, booleans, None, or short tuples, lists and sets of these. Also watched
are plain tensors and NumPy arrays, and writes to them; modes, hooks and submodules; and which parameters there are and
require gradients. Farther than three levels down, and in lists of other objects, what the code names is watched: a
trainer that a loss refers to has counters that no loss reads.
"""

from __future__ import annotations

import dis
import warnings
from collections.abc import Iterable, Iterator, Set
from functools import lru_cache
from io import IOBase
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from tutti import compat
from tutti.tracing.trace.snapshot import LARGEST, MISSING, OPAQUE, is_library, is_of_the_system, join, variables

PLAIN = (bool, int, float, str, bytes, complex, type(None), torch.dtype, torch.device, np.generic)
SHORT = 32  # maximum items of a watched list
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
TABLES = ("_parameters", "_buffers", "_modules", *HOOKS)
DEEPEST, DEEPEST_NAMED = 3, 12  # maximum depth of watched objects, and of those that code names
LARGEST_ARRAY = 1 << 20  # bytes of an array that is compared at each step


class Watch:
    """The state of a model, and of functions and objects that use it, when the Watch was created.

    attributes: paths of tensors that are state of the step. state: other tensors that are.
    """

    def __init__(self, model: nn.Module, attributes: frozenset[str] = frozenset(), users: Iterable[Any] = (),
                 state: Iterable[torch.Tensor] = ()):  # fmt: skip
        self.model = model
        self.stored = {id(x) for x in (*model.parameters(), *model.buffers(), *state)}  # read again in each step
        self.values: list[tuple[dict[str, Any], str, Any, str]] = []  # where, key, value, path
        self.sequences: list[tuple[Any, Any, str]] = []  # lists and sets, with their contents
        self.arrays: list[tuple[Any, Any, np.ndarray, np.ndarray, str]] = []  # with their contents
        self.tensors: list[tuple[dict[str, Any], str, torch.Tensor, int, str]] = []  # with their versions
        self.sizes: list[tuple[dict, int, str]] = []  # numbers of attributes
        self.hooks: list[tuple[dict[int, Any], list[int], str]] = []  # tables and their keys
        self.children: list[tuple[dict[str, Any], list, str]] = []  # tables and their modules
        self.large: list[tuple[np.ndarray, str]] = []  # arrays that are not watched
        self.beyond: list[tuple[str, Any]] = []  # objects farther down
        self.names: set[str] = set()  # that code names
        seen: set[int] = set()
        self._watch_users([*users, *dict.fromkeys(map(type, model.modules()))], model, seen)
        for path, module in model.named_modules():
            tables = [(module.__dict__[name], join(path, name)) for name in HOOKS]
            self.hooks += [(table, list(table), name) for table, name in tables]
            self.children.append((module._modules, list(module._modules.values()), path))
            for at, namespace in self._tables(path, module.__dict__, seen, DEEPEST):
                self.sizes.append((namespace, len(namespace), at))
                for key, value in namespace.items():
                    if key != "_non_persistent_buffers_set":
                        self._watch(namespace, key, value, join(at, key), attributes)
        self._watch_beyond(seen)
        self.learning = _learning(model)

    def _tables(self, path: str, namespace: dict, seen: set[int], depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the attributes of a module, and of the plain objects and dicts in it."""
        yield path, namespace
        for key, x in namespace.items():
            if key in TABLES or (inner := _inside(x)) is None or id(x) in seen:
                continue
            if depth and not isinstance(inner, Items):
                seen.add(id(x))
                yield from self._tables(join(path, str(key)), inner, seen, depth - 1)
            else:
                self.beyond.append((join(path, str(key)), x))

    def _watch_beyond(self, seen: set[int]) -> None:
        """Watch what code names, in objects farther down and in lists of objects."""
        level = self.beyond
        for _ in range(DEEPEST_NAMED):
            below = []
            for path, x in level:
                inner = _inside(x)
                if id(x) in seen or inner is None:
                    continue
                seen.add(id(x))
                for key, value in inner.items():
                    if isinstance(key, str) and key not in self.names:
                        continue
                    at = f"{path}[{key}]" if isinstance(inner, Items) else join(path, str(key))
                    self._watch(inner, key, value, at, frozenset())
                    below.append((at, value))
            level = below

    def _watch_users(self, users: list[Any], model: nn.Module, seen: set[int]) -> None:
        """Watch the references of functions, callable objects and classes, and the global variables that they name."""
        inside = {id(module) for module in model.modules()}
        visited: set[int] = set()
        while users:
            x = users.pop()
            if id(x) in visited or id(x) in inside:
                continue
            visited.add(id(x))
            if isinstance(x, MethodType):
                users += [x.__self__, x.__func__]
            elif isinstance(x, FunctionType):
                self.names |= _attributes(x.__code__)
                cells = zip(x.__code__.co_freevars, x.__closure__ or (), strict=True)
                self._watch_all(x.__qualname__, {name: Cell(cell) for name, cell in cells}, seen, users)
                if not is_library(str(x.__module__)):
                    names, attributes = names_of_globals(x.__code__), _attributes(x.__code__)
                    for namespace in [x.__globals__, *_modules(names, x.__globals__)]:
                        names = names if namespace is x.__globals__ else attributes
                        self._watch_all(
                            str(namespace.get("__name__", x.__module__)),
                            dict.fromkeys(names & namespace.keys(), namespace),
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
        """Watch entries of containers (holders, by key). Modules and functions among them are added to `users`."""
        for key, holder in holders.items():
            value, at = holder.get(key, MISSING), join(path, key)
            if isinstance(value, (nn.Module, FunctionType, MethodType)):
                if not is_library(str(getattr(value, "__module__", ""))) or isinstance(value, nn.Module):
                    users.append(value)
                if isinstance(value, nn.Module):
                    self.values.append((holder, key, value, at))
                continue
            self._watch(holder, key, value, at, frozenset())
            if isinstance(holder, Cell) and isinstance(value, Iterator) and not isinstance(value, IOBase):
                warnings.warn(
                    f"{at} is an iterator. A step is captured once: what it takes from the iterator is a constant. "
                    "Pass the values with the batch",
                    stacklevel=2,
                )
            inner = None if isinstance(value, torch.optim.Optimizer) else _inside(value)
            if isinstance(inner, Items):
                self.beyond.append((at, value))
            elif inner is not None and id(value) not in seen:
                seen.add(id(value))
                for where, namespace in self._tables(at, inner, seen, DEEPEST - 1):
                    for k, item in namespace.items():
                        self._watch(namespace, k, item, join(where, str(k)), frozenset())

    def _watch(self, holder: Any, key: str, value: Any, path: str, attributes: frozenset[str]) -> None:
        if isinstance(value, PLAIN) or (isinstance(value, tuple) and all(isinstance(x, PLAIN) for x in value)):
            self.values.append((holder, key, value, path))
        elif isinstance(value, list) and len(value) <= SHORT and all(isinstance(x, PLAIN) for x in value):
            self.values.append((holder, key, value, path))
            self.sequences.append((value, list(value), path))
        elif isinstance(value, (set, frozenset)) and len(value) <= SHORT and all(isinstance(x, PLAIN) for x in value):
            self.sequences.append((value, frozenset(value), path))
        elif isinstance(value, np.ndarray) and value.dtype != object:
            if value.nbytes <= LARGEST_ARRAY:
                self.arrays.append((holder, key, value, value.copy(), path))
            else:
                self.large.append((value, path))
        elif isinstance(value, torch.Tensor) and path not in attributes and id(value) not in self.stored:
            self.tensors.append((holder, key, value, value._version, path))

    def captured(self, constants: Iterable[torch.Tensor]) -> None:
        """A graph with these constants has been captured. Arrays whose memory it reads are not watched any more; a
        warning names large ones, which the graph has taken as constants."""
        places = {x.untyped_storage().data_ptr() for x in constants if x.device.type == "cpu"}
        self.arrays = [row for row in self.arrays if row[2].ctypes.data not in places]
        for array, path in self.large:
            if array.ctypes.data not in places:
                warnings.warn(
                    f"{path} is an array of {array.nbytes >> 20} MiB, too large to be compared at each step. A step is "
                    "captured once: what it reads of the array is a constant. Use a tensor, or pass it with the batch",
                    stacklevel=2,
                )
        self.large = []

    def state(self) -> tuple[tuple[str, Any], ...]:
        """Return the differences as (path, value now). Hashable; () if there are none."""
        changes: list[tuple[str, Any]] = []
        for holder, key, value, path in self.values:
            now = holder.get(key, MISSING)
            if now is not value and (type(now) is not type(value) or now != value):
                changes.append((path, now if isinstance(now, (*PLAIN, tuple)) else Same(now)))
        for sequence, value, path in self.sequences:
            if sequence != value:
                changes.append((path, tuple(sequence) if isinstance(sequence, list) else frozenset(sequence)))
        for holder, key, array, value, path in self.arrays:
            now = holder.get(key, MISSING)
            if not isinstance(now, np.ndarray) or (now is not array and now.dtype != value.dtype):
                changes.append((path, Same(now)))
            elif now.shape != value.shape or now.tobytes() != value.tobytes():
                changes.append((path, Array(now)))
        for holder, key, tensor, version, path in self.tensors:
            now = holder.get(key, MISSING)
            if now is not tensor or tensor._version != version:
                changes.append((path, (Same(now), getattr(now, "_version", 0))))
        changes += [(f"the attributes of {path}", len(x)) for x, size, path in self.sizes if len(x) != size]
        changes += [(path, tuple(table)) for table, keys, path in self.hooks if list(table) != keys]
        for table, modules, path in self.children:
            now = list(table.values())
            if len(now) != len(modules) or any(a is not b for a, b in zip(now, modules, strict=True)):
                changes.append((path, tuple(map(Same, now))))
        return tuple(changes)

    @property
    def learns_otherwise(self) -> bool:
        """Return whether the model's parameters, or which of them require gradients, have changed."""
        return _learning(self.model) != self.learning


def is_plain_dict(x: Any) -> bool:
    """Return whether this is a dict without overridden access methods."""
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


class Items:
    """A list or tuple as a dict by index."""

    def __init__(self, sequence: list | tuple):
        self.sequence = sequence

    def get(self, key: int, default: Any) -> Any:
        return self.sequence[key] if key < len(self.sequence) else default

    def items(self) -> Iterator[tuple[int, Any]]:
        return enumerate(self.sequence)

    def __len__(self) -> int:
        return len(self.sequence)


def _inside(x: Any) -> Any:
    """The attributes of a plain object, the items of a dict, or those of a short list of others than plain values."""
    if isinstance(x, (list, tuple)):
        return Items(x) if len(x) <= SHORT and not all(isinstance(i, PLAIN) for i in x) else None
    if isinstance(x, dict):
        inner: Any = x
    elif isinstance(x, (*OPAQUE, nn.Module, set, frozenset, np.ndarray)) or is_of_the_system(x):
        return None
    else:
        inner = getattr(x, "__dict__", None)
    return inner if is_plain_dict(inner) and len(inner) <= LARGEST else None


@lru_cache(1 << 14)  # each capture visits the code of all classes of the model and their bases
def names_of_globals(code: CodeType) -> frozenset[str]:
    """The global names used by code and by functions within it."""
    inner = (x for x in code.co_consts if isinstance(x, CodeType))
    own = frozenset(x.argval for x in dis.get_instructions(code) if x.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return own.union(*map(names_of_globals, inner))


@lru_cache(1 << 14)
def _attributes(code: CodeType) -> frozenset[str]:
    """The names of attributes and globals used by code, and its texts, which may be keys."""
    inner = (x for x in code.co_consts if isinstance(x, CodeType))
    texts = (x for x in code.co_consts if isinstance(x, str))
    return frozenset((*code.co_names, *texts)).union(*map(_attributes, inner))


def _modules(names: Set[str], namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the variables of imported files that code names, such as a file of settings."""
    modules = [namespace[name] for name in names & namespace.keys() if isinstance(namespace[name], ModuleType)]
    return [vars(module) for module in modules if not is_library(module.__name__)]


class Array:
    """The content of an array, compared by its bytes."""

    def __init__(self, array: np.ndarray):
        self.content = array.dtype.str, array.shape, array.tobytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Array) and self.content == other.content

    def __hash__(self) -> int:
        return hash(self.content)

    def __repr__(self) -> str:
        return f"an array {self.content[1]} of other values"


class Same:
    """An object compared by identity. It is kept alive, so that its id stays unique."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"another {type(self.value).__name__}"


def _learning(model: nn.Module) -> list[tuple[str, int, bool, int]]:
    """Return name, id, whether it requires gradients, and number of gradient hooks, of each parameter and buffer."""
    params = [(name, id(p), p.requires_grad, sum(map(len, compat.hooks_on(p)))) for name, p in model.named_parameters()]
    return [*params, *((name, id(b), False, 0) for name, b in model.named_buffers())]
