"""The Python state of a model: recorded before capture runs its forward pass, and put back afterwards.

Forward may assign attributes, append to lists, count calls and draw Python random numbers. Capture runs it on fake
tensors, so whatever it leaves behind is undone: attributes of modules, the lists, dicts, sets and plain objects that
they hold, and the random generators of Python and NumPy.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

CONTAINERS = (list, dict, set, deque)
LARGEST = 10_000  # items of a container that are looked into: what is larger is data
DEEPEST = 6  # attributes and items between a module and what it holds
OPAQUE = (torch.Tensor, type, ModuleType, FunctionType, MethodType, str, bytes, int, float, complex, bool, type(None),
          torch.dtype, torch.device, torch.Size)  # fmt: skip
MISSING = object()


class Snapshot:
    """The state of everything that can be reached from `roots` through attributes and containers.

    A container in a closure of a hook or of another function that a module holds is reached, too.
    """

    def __init__(self, roots: Iterable[Any]):
        self.saved: dict[int, tuple[str, Any, Any]] = {}  # by id: path, container, its content then
        self.generators: dict[str, tuple[Any, Any]] = {}  # of random numbers, with their states, by path
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
        """Record the content of one object; what else to look into, with its path."""
        if isinstance(thing, FunctionType):
            return [(path, cell.cell_contents) for cell in thing.__closure__ or () if _filled(cell)]
        if isinstance(thing, MethodType):
            return [(path, thing.__self__), (path, thing.__func__)]
        if isinstance(thing, random.Random) or type(thing).__module__ == "numpy.random._generator":
            self.generators[path] = thing, _state_of(thing)
            return []
        if isinstance(thing, tuple):
            return [(f"{path}[{i}]", x) for i, x in enumerate(thing)] if len(thing) <= LARGEST else []
        if isinstance(thing, CONTAINERS):
            self.saved[id(thing)] = path, thing, _content(thing)
            items = thing.items() if isinstance(thing, dict) else enumerate(thing)
            return [(f"{path}[{key!r}]", x) for key, x in items] if len(thing) <= LARGEST else []
        held = getattr(thing, "__dict__", None)
        if isinstance(thing, OPAQUE) or not isinstance(held, dict) or is_of_the_system(thing):
            return []
        self.saved[id(held)] = path, held, dict(held)
        if not isinstance(thing, nn.Module):
            return [(join(path, key), x) for key, x in held.items()]
        for table in (thing._parameters, thing._buffers, thing._modules):
            self.saved[id(table)] = path, table, dict(table)
        tables = ("_parameters", "_buffers", "_modules")
        own = [(join(path, key), x) for key, x in held.items() if key not in tables]
        return own + [(join(path, key), x) for key, x in thing._modules.items()]

    def changes(self) -> dict[str, tuple[Any, Any]]:
        """Paths of attributes and items that hold something else now -> (before, now); `MISSING` for nothing."""
        found = {}
        for path, thing, before in self.saved.values():
            if isinstance(thing, dict):
                for key in {**before, **thing}:
                    old, new = before.get(key, MISSING), thing.get(key, MISSING)
                    if old is not new and not _equal(old, new):
                        found[join(path, str(key))] = old, new
            elif isinstance(thing, set):
                if thing != before:
                    found[path] = before, set(thing)
            elif len(before) != len(thing) or not all(
                a is b or _equal(a, b) for a, b in zip(before, thing, strict=True)
            ):
                found[path] = before, list(thing)
        return found

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Plain attributes of objects that held a tensor, with their paths."""
        for path, _, before in self.saved.values():
            if isinstance(before, dict):
                yield from ((join(path, str(k)), x) for k, x in before.items() if isinstance(x, torch.Tensor))

    @property
    def random_was_drawn(self) -> list[str]:
        """The generators that have been used since: "random", "numpy.random", and paths of attributes."""
        now = _random_states()
        drawn = [name for name, state in self.random.items() if repr(now.get(name)) != repr(state)]
        return drawn + [path for path, (own, state) in self.generators.items() if repr(_state_of(own)) != repr(state)]

    def reseed(self, seed: int) -> None:
        """Let all generators draw other numbers than they would."""
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        for own, _ in self.generators.values():
            if isinstance(own, random.Random):
                own.seed(seed)
            else:
                own.bit_generator.state = type(own.bit_generator)(seed).state

    def restore(self) -> None:
        """Put everything back; containers keep their identity."""
        for _, thing, before in self.saved.values():
            if isinstance(thing, dict):
                if list(thing) != list(before) or any(thing[key] is not x for key, x in before.items()):
                    thing.clear()
                    thing.update(before)
            elif isinstance(thing, list):
                thing[:] = before
            else:
                thing.clear()
                thing.update(before) if isinstance(thing, set) else thing.extend(before)
        for own, before in self.generators.values():
            if isinstance(own, random.Random):
                own.setstate(before)
            else:
                own.bit_generator.state = before
        random.setstate(self.random["random"])
        if "numpy.random" in self.random:
            sys.modules["numpy"].random.set_state(self.random["numpy.random"])


def _state_of(generator: Any) -> Any:
    return generator.getstate() if isinstance(generator, random.Random) else generator.bit_generator.state


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"random": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy.random"] = sys.modules["numpy"].random.get_state()
    return states


def _content(thing: Any) -> Any:
    return dict(thing) if isinstance(thing, dict) else set(thing) if isinstance(thing, set) else list(thing)


def _equal(a: Any, b: Any) -> bool:
    """Whether two plain values are the same; False for what cannot be compared that way."""
    return type(a) is type(b) and isinstance(a, (str, bytes, int, float, bool, complex)) and a == b


def is_of_the_system(thing: Any) -> bool:
    """Whether an object is Python's own: a logger, a thread, a file."""
    package = type(thing).__module__.partition(".")[0]
    return package in sys.stdlib_module_names and package not in ("collections", "types", "__main__")


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not MISSING
    except ValueError:
        return False


def join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
