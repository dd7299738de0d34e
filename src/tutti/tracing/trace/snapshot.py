"""Save the Python state of a model before capture runs its forward pass, and restore it afterwards.

Forward may assign attributes, append to lists, count calls and draw Python random numbers. Capture runs it on fake
tensors, so all side effects are undone: attributes of modules; the lists, dicts, sets and plain objects in them;
attributes of their classes; global variables of the files that define these; default arguments; results cached by
`functools.lru_cache`; variables of closures; and the random generators of Python and NumPy.
"""

from __future__ import annotations

import functools
import gc
import random
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from tutti.compat import FakeTensor
from tutti.ir.garbage import unfrozen

CONTAINERS = (list, dict, set, deque)
LARGEST = 10_000  # items: larger containers are data and are skipped
DEEPEST = 6  # maximum depth of attributes and items below a module
OPAQUE = (torch.Tensor, type, ModuleType, FunctionType, MethodType, str, bytes, int, float, complex, bool, type(None),
          torch.dtype, torch.device, torch.Size)  # fmt: skip
MISSING = object()
INTERNAL = ("torch._", "tutti.")  # objects of these are not followed
LIBRARIES = ("torch", "numpy", "tutti")  # classes and global variables of these are not the model's
Cache = functools._lru_cache_wrapper


class Snapshot:
    """The state of everything reachable from `roots` through attributes and containers.

    This includes containers in a closure or a default argument of a hook or of another function that a module refers
    to.
    """

    def __init__(self, roots: Iterable[Any]):
        self.saved: dict[int, tuple[str, Any, Any]] = {}  # by id: path, container, saved content
        self.cells: dict[int, tuple[str, CellType, Any]] = {}  # by id: variable of a closure, its saved value
        self.generators: dict[str, tuple[Any, Any]] = {}  # random generators and their saved states, by path
        self.caches = {id(cache): (cache, cache.cache_info().misses) for cache in _caches()}
        self.namespaces: dict[int, tuple[str, Any, dict[str, Any]]] = {}  # by id: path, class or dict, saved variables
        todo = [("", root, 0) for root in roots]
        seen: set[int] = set()
        while todo:
            path, thing, depth = todo.pop()
            if id(thing) not in seen and depth <= DEEPEST:
                seen.add(id(thing))
                depth = 0 if isinstance(thing, nn.Module) else depth + 1
                todo += [(at, x, depth) for at, x in self._save(path, thing)]
        self.random = _random_states()

    def _save(self, path: str, thing: Any) -> list[tuple[str, Any]]:
        """Save the content of one object. Returns the objects in it, with their paths, to be visited next."""
        if isinstance(thing, Cache):
            self.caches.setdefault(id(thing), (thing, thing.cache_info().misses))
            return []
        if isinstance(thing, FunctionType):
            named = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True)
            cells = [(name, cell) for name, cell in named if _filled(cell)]
            self.cells |= {id(cell): (join(path, name), cell, cell.cell_contents) for name, cell in cells}
            children = [(join(path, name), cell.cell_contents) for name, cell in cells]
            children += [(path, x) for x in (*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values())]
            return children + self._save_globals(thing.__globals__)
        if isinstance(thing, MethodType):
            return [(path, thing.__self__), (path, thing.__func__)]
        if isinstance(thing, random.Random) or type(thing).__module__ == "numpy.random._generator":
            self.generators[path] = thing, _state_of(thing)
            return []
        if isinstance(thing, tuple):
            return [(f"{path}[{i}]", x) for i, x in enumerate(thing)] if len(thing) <= LARGEST else []
        if isinstance(thing, CONTAINERS):
            self.saved[id(thing)] = path, thing, _content(thing)
            items = _items(thing).items() if isinstance(thing, dict) else enumerate(thing)
            return [(f"{path}[{key!r}]", x) for key, x in items] if len(thing) <= LARGEST else []
        attributes = getattr(thing, "__dict__", None)
        inside = type(thing).__module__.startswith(INTERNAL) and not isinstance(thing, nn.Module)
        if isinstance(thing, OPAQUE) or not isinstance(attributes, dict) or is_of_the_system(thing) or inside:
            return []
        self.saved[id(attributes)] = path, attributes, dict(attributes)
        beside = self._save_class(type(thing))
        if not isinstance(thing, nn.Module):
            return [(join(path, key), x) for key, x in attributes.items()] + beside
        for table in (thing._parameters, thing._buffers, thing._modules):
            self.saved[id(table)] = path, table, dict(table)
        tables = ("_parameters", "_buffers", "_modules")
        own = [(join(path, key), x) for key, x in attributes.items() if key not in tables]
        return own + [(join(path, key), x) for key, x in thing._modules.items()] + beside

    def _save_class(self, cls: type) -> list[tuple[str, Any]]:
        """Save the attributes of a class and its bases, and the global variables of the files that define them."""
        beside = []
        for base in cls.__mro__:
            if id(base) not in self.namespaces and not is_library(base.__module__):
                beside += self._save_namespace(base.__qualname__, base, base.__dict__)
                if module := sys.modules.get(base.__module__):
                    beside += self._save_globals(module.__dict__)
        return beside

    def _save_globals(self, namespace: dict[str, Any]) -> list[tuple[str, Any]]:
        name = str(namespace.get("__name__", ""))
        if id(namespace) in self.namespaces or is_library(name):
            return []
        return self._save_namespace(name, namespace, namespace)

    def _save_namespace(self, path: str, owner: Any, namespace: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Save the variables of a class or file. Returns the objects and containers among them."""
        self.namespaces[id(owner)] = path, owner, variables(namespace)
        objects = []
        for key, x in variables(namespace).items():
            if not isinstance(x, (*OPAQUE, Cache, staticmethod, classmethod, property)):
                objects.append((join(path, key), x))
            function = getattr(x, "__func__", x)  # for a static method
            inside = function.__closure__ or () if isinstance(function, FunctionType) else ()
            for cache in (function, *(cell.cell_contents for cell in inside if _filled(cell))):
                if isinstance(cache, Cache):
                    self.caches.setdefault(id(cache), (cache, cache.cache_info().misses))
        return objects

    def changes(self) -> dict[str, tuple[Any, Any]]:
        """Return (before, now) by path for changed attributes and items; `MISSING` where there is none."""
        differences = {}
        dicts = [
            (path, before, _items(thing)) for path, thing, before in self.saved.values() if isinstance(thing, dict)
        ]
        dicts += [(path, before, variables(_namespace_of(owner))) for path, owner, before in self.namespaces.values()]
        for path, before, now in dicts:
            for key in {**before, **now}:
                old, new = before.get(key, MISSING), now.get(key, MISSING)
                if old is not new and not _equal(old, new):
                    differences[join(path, str(key))] = old, new
        for path, cell, before in self.cells.values():
            now = cell.cell_contents if _filled(cell) else MISSING
            if now is not before and not _equal(now, before):
                differences[path] = before, now
        for path, thing, before in self.saved.values():
            if isinstance(thing, set):
                if thing != before:
                    differences[path] = before, set(thing)
            elif not isinstance(thing, dict) and (
                len(before) != len(thing) or not all(a is b or _equal(a, b) for a, b in zip(before, thing, strict=True))
            ):
                differences[path] = before, list(thing)
        return differences

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Plain attributes that were tensors, with their paths."""
        for path, _, before in self.saved.values():
            if isinstance(before, dict):
                yield from ((join(path, str(k)), x) for k, x in before.items() if isinstance(x, torch.Tensor))

    @property
    def random_was_drawn(self) -> list[str]:
        """The generators used since: "random", "numpy.random", and paths of attributes."""
        now = _random_states()
        drawn = [name for name, state in self.random.items() if repr(now.get(name)) != repr(state)]
        return drawn + [path for path, (own, state) in self.generators.items() if repr(_state_of(own)) != repr(state)]

    def reseed(self, seed: int) -> None:
        """Make all generators draw other numbers."""
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        for own, _ in self.generators.values():
            if isinstance(own, random.Random):
                own.seed(seed)
            else:
                own.bit_generator.state = type(own.bit_generator)(seed).state

    def filled(self) -> dict[str, tuple[Any, Any]]:
        """Function caches that now contain fake tensors, in the form of `changes`."""
        return {str(cache.__qualname__): (MISSING, cache) for cache in self._fake_caches()}

    def _fake_caches(self) -> list[Cache]:
        used = (cache for cache, misses in self.caches.values() if cache.cache_info().misses != misses)
        return [cache for cache in used if _holds_fake(gc.get_referents(cache))]

    def restore(self) -> None:
        """Restore everything. Containers keep their identity."""
        for _, thing, before in self.saved.values():
            if isinstance(thing, dict):
                now = _items(thing)
                if list(now) != list(before) or any(now[key] is not x for key, x in before.items()):
                    thing.clear()
                    thing.update(before)
            elif isinstance(thing, list):
                thing[:] = before
            else:
                thing.clear()
                thing.update(before) if isinstance(thing, set) else thing.extend(before)
        for _, cell, before in self.cells.values():
            cell.cell_contents = before
        for _, owner, before in self.namespaces.values():
            now = variables(_namespace_of(owner))
            for key in [key for key in now.keys() - before.keys() if not isinstance(now[key], ModuleType)]:
                delattr(owner, key) if isinstance(owner, type) else owner.pop(key)
            for key in [key for key, x in before.items() if now.get(key, MISSING) is not x]:
                setattr(owner, key, before[key]) if isinstance(owner, type) else owner.update({key: before[key]})
        for cache in self._fake_caches():
            cache.cache_clear()
        for own, before in self.generators.values():
            if isinstance(own, random.Random):
                own.setstate(before)
            else:
                own.bit_generator.state = before
        random.setstate(self.random["random"])
        if "numpy.random" in self.random:
            sys.modules["numpy"].random.set_state(self.random["numpy.random"])


_process_caches: tuple[int, list[weakref.ref[Cache]]] = (0, [])  # number of modules then, and their caches


def _caches() -> list[Cache]:
    """Return the `functools.lru_cache` wrappers of the process. They are searched again after imports."""
    global _process_caches
    if _process_caches[0] != len(sys.modules):
        with unfrozen():
            caches = [x for x in gc.get_objects() if type(x) is Cache]
        _process_caches = len(sys.modules), [weakref.ref(x) for x in caches if not is_library(str(x.__module__))]
    return [cache for reference in _process_caches[1] if (cache := reference()) is not None]


def _holds_fake(things: Iterable[Any], depth: int = 3) -> bool:
    """Return whether the results in a cache contain a fake tensor."""
    for x in things:
        if isinstance(x, FakeTensor):
            return True
        inner = _items(x).values() if isinstance(x, dict) else x if isinstance(x, (*CONTAINERS, tuple)) else ()
        if not inner and not isinstance(x, (*OPAQUE, Cache)) and not is_of_the_system(x):
            inner = getattr(x, "__dict__", {}).values()
        if depth and _holds_fake(inner, depth - 1):
            return True
    return False


def is_library(module: str) -> bool:
    """Return whether a module's classes and global variables are not part of the model."""
    package = module.partition(".")[0]
    return package in LIBRARIES or (package in sys.stdlib_module_names and package != "__main__")


def _namespace_of(owner: Any) -> Mapping[str, Any]:
    return owner.__dict__ if isinstance(owner, type) else owner


def variables(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of a class or file, without those of Python or TorchDynamo."""
    return {key: x for key, x in namespace.items() if not key.startswith("__")}


def _state_of(generator: Any) -> Any:
    return generator.getstate() if isinstance(generator, random.Random) else generator.bit_generator.state


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"random": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy.random"] = sys.modules["numpy"].random.get_state()
    return states


def _content(thing: Any) -> Any:
    return _items(thing) if isinstance(thing, dict) else set(thing) if isinstance(thing, set) else list(thing)


def _items(thing: dict) -> dict[Any, Any]:
    """The items of a dict, ignoring overridden access methods."""
    return dict(thing if type(thing) is OrderedDict else dict.items(thing))


def _equal(a: Any, b: Any) -> bool:
    """Return whether two plain values are equal. False for other types."""
    return type(a) is type(b) and isinstance(a, (str, bytes, int, float, bool, complex)) and a == b


def is_of_the_system(thing: Any) -> bool:
    """Return whether an object belongs to Python's library: a logger, a thread, a file."""
    package = type(thing).__module__.partition(".")[0]
    return package in sys.stdlib_module_names and package not in ("collections", "types", "__main__")


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not MISSING
    except ValueError:
        return False


def join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
