"""Objects as JSON and bytes of arrays, so that a file holds data and no code.

    words, arrays = pack({"t": np.zeros(3), "rng": np.random.default_rng(0)})
    again = unpack(words, arrays)

`words` is what JSON can hold, `arrays` maps names to uint8 arrays. Understood are numbers, texts, bytes, lists, tuples,
dicts, sets, deques, arrays of NumPy, tensors, random generators, members of enumerations, and objects with attributes.
Two references to one object stay references to one object.

`unpack` neither imports nor calls anything that the words name. An object is restored into the one that stands at the
same place in `like`, or into a new instance of a class of which `like` holds another; its attributes are set, and none
of its methods is called. Functions, classes, modules and what `stays` says are not stored: they are taken from `like`.
"""

from __future__ import annotations

import base64
import enum
import functools
import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

Arrays = dict[str, np.ndarray]
CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, type, functools.partial)
BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
PLACES = {"MT19937": ("pos", 624), "Philox": ("buffer_pos", 4)}  # where their next number is, and the most it can be
HEAP = 1 << 9  # the flag of types that Python code defines
SEQUENCES: dict[str, type] = {"list": list, "set": set, "frozenset": frozenset, "tuple": tuple}


class Unstorable(ValueError):
    """A value that is neither data nor an object whose data can be read."""


def pack(value: Any, stays: Callable[[Any], bool] = lambda x: False) -> tuple[Any, Arrays]:
    """(words, arrays) of a value. stays: whether a value belongs to the process and is left out.

    Raises Unstorable with the place of what cannot be stored.
    """
    packing = _Packing(stays)
    return packing.words(value, "state"), packing.arrays


def unpack(words: Any, arrays: Arrays, like: Any = None) -> Any:
    """The value of (words, arrays). Raises ValueError where they are not what `pack` returns, and where they have
    objects unlike those of `like`."""
    try:
        return _Unpacking(arrays, like).value(words, like)
    except (TypeError, KeyError, IndexError, AttributeError, OverflowError, RuntimeError) as error:
        raise ValueError(f"the stored state is damaged: {type(error).__name__}: {error}") from error


class _Packing:
    def __init__(self, stays: Callable[[Any], bool]):
        self.stays, self.arrays = stays, Arrays()
        self.seen: dict[int, int] = {}
        self.alive: list[Any] = []  # ids are unique among objects that exist

    def words(self, x: Any, path: str) -> Any:
        if x is None or type(x) in (bool, int, float, str):
            return x
        if id(x) in self.seen:
            return ["ref", self.seen[id(x)]]
        if type(x) is tuple or type(x) is frozenset:
            return [type(x).__name__, [self.words(y, f"{path}[{i}]") for i, y in enumerate(x)]]
        if isinstance(x, np.generic) and x.dtype.kind in "biufU":
            return ["number", x.dtype.str, x.item()]
        if type(x) is bytes:
            return ["bytes", base64.b64encode(x).decode()]
        if isinstance(x, enum.Enum):
            return ["enum", _label(type(x)), x.name]
        self.seen[id(x)] = len(self.alive)
        self.alive.append(x)
        if isinstance(x, types.MethodType) and _method(x.__self__, x.__name__) is x.__func__:
            return ["method", self.words(x.__self__, path), x.__name__]
        if isinstance(x, CODE) or self.stays(x):
            return ["stays", _label(x)]
        match x:
            case list() | set() if type(x) in (list, set):
                return [type(x).__name__, [self.words(y, f"{path}[{i}]") for i, y in enumerate(x)]]
            case deque():
                return ["deque", [self.words(y, f"{path}[{i}]") for i, y in enumerate(x)], x.maxlen]
            case dict() if type(x) in (dict, OrderedDict):
                pairs = [[self.words(k, path), self.words(v, f"{path}[{k!r}]")] for k, v in x.items()]
                return ["ordered" if type(x) is OrderedDict else "dict", pairs]
            case np.ndarray() if x.dtype.kind == "O":
                return ["objects", list(x.shape), [self.words(y, path) for y in x.flat]]
            case np.ndarray() if x.dtype.kind in "biufcSUmM":
                return ["array", self._store_array(np.frombuffer(x.tobytes(), np.uint8)), x.dtype.str, list(x.shape)]
            case torch.Tensor():
                flat = x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().copy()
                return ["tensor", self._store_array(flat), str(x.dtype).removeprefix("torch."), list(x.shape)]
            case np.random.Generator():
                return ["generator", *self._bits(x.bit_generator, path)]
            case np.random.RandomState():
                return ["random_state", self.words(x.get_state(legacy=False), path)]
            case random.Random() if type(x) is random.Random:
                return ["random", self.words(x.getstate(), path)]
            case torch.Generator():
                return ["torch_generator", self.words(x.get_state(), path)]
        if not _is_plain_class(type(x)):
            raise Unstorable(f"{path} is a {_label(type(x))}, which is not data")
        attributes = [[name, self.words(y, f"{path}.{name}")] for name, y in _attributes(x).items()]
        return ["object", _label(type(x)), attributes]

    def _store_array(self, flat: np.ndarray) -> str:
        name = str(len(self.arrays))
        self.arrays[name] = flat
        return name

    def _bits(self, bits: Any, path: str) -> tuple[str, Any, Any]:
        if type(bits).__name__ not in BIT_GENERATORS:
            raise Unstorable(f"{path} draws from a {type(bits).__name__}, which is not one of {BIT_GENERATORS}")
        sequence = getattr(bits, "seed_seq", None)
        seeds = sequence.state if isinstance(sequence, np.random.SeedSequence) else None
        return type(bits).__name__, self.words(bits.state, path), self.words(seeds, path)


class _Unpacking:
    def __init__(self, arrays: Arrays, like: Any):
        self.arrays, self.objects, self.used = arrays, [], set()
        self.code: dict[str, Any] = {}  # classes and functions of `like`, before its attributes are replaced
        for x in _reachable(like):
            for y in (x, type(x)):
                if isinstance(y, CODE):
                    self.code.setdefault(_label(y), y)

    def find_code(self, label: str) -> Any:
        """Look up a class or function of `like` by its label."""
        if label not in self.code:
            raise ValueError(f"the state has a {label}, and the environment that it is loaded into has none")
        return self.code[label]

    def value(self, words: Any, like: Any) -> Any:
        if words is None or isinstance(words, bool | int | float | str):
            return words
        if not isinstance(words, list) or not words or not isinstance(words[0], str):
            raise ValueError(f"the stored state is damaged: {str(words)[:80]}")
        kind, *arguments = words
        if kind == "ref":
            return self.objects[self._index(arguments[0])]
        if kind in ("tuple", "frozenset"):
            return SEQUENCES[kind](self._each(arguments[0], like))
        if kind == "number":
            return _dtype(arguments[0], "biufU").type(arguments[1])
        if kind == "bytes":
            return base64.b64decode(arguments[0], validate=True)
        if kind == "enum":
            return self._member(*arguments)
        reader = getattr(self, f"_of_{kind}", None)
        if reader is None:
            raise ValueError(f"the stored state is damaged: there is no kind {kind!r}")
        place = len(self.objects)
        self.objects.append(None)
        return reader(place, like, *arguments)

    def _index(self, i: Any) -> int:
        if not isinstance(i, int) or not 0 <= i < len(self.objects):
            raise ValueError(f"the stored state is damaged: reference {i!r}")
        return i

    def _each(self, words: list[Any], like: Any) -> Iterator[Any]:
        templates = list(like) if isinstance(like, list | tuple | deque) else []
        for i, x in enumerate(words):
            yield self.value(x, templates[i] if i < len(templates) else None)

    def _member(self, label: str, name: str) -> Any:
        kind = self.find_code(label)
        if not isinstance(kind, enum.EnumMeta):
            raise ValueError(f"the stored state is damaged: {label} is no enumeration")
        return kind[name]

    def _of_list(self, place: int, like: Any, words: list[Any]) -> list[Any]:
        items = self.objects[place] = []
        items.extend(self._each(words, like))
        return items

    def _of_set(self, place: int, like: Any, words: list[Any]) -> set[Any]:
        members = self.objects[place] = set()
        members.update(self._each(words, None))
        return members

    def _of_deque(self, place: int, like: Any, words: list[Any], length: int | None) -> deque[Any]:
        items = self.objects[place] = deque(maxlen=length)
        items.extend(self._each(words, like))
        return items

    def _of_dict(self, place: int, like: Any, pairs: list[Any], kind: type = dict) -> dict[Any, Any]:
        table = self.objects[place] = kind()
        templates = like if isinstance(like, dict) else {}
        for key, x in pairs:
            key = self.value(key, None)
            table[key] = self.value(x, templates.get(key))
        return table

    def _of_ordered(self, place: int, like: Any, pairs: list[Any]) -> dict[Any, Any]:
        return self._of_dict(place, like, pairs, OrderedDict)

    def _of_objects(self, place: int, like: Any, shape: list[int], words: list[Any]) -> np.ndarray:
        array = self.objects[place] = np.empty(len(words), object)
        array[:] = [self.value(x, None) for x in words]
        self.objects[place] = array = array.reshape(shape)
        return array

    def _of_array(self, place: int, like: Any, name: str, dtype: str, shape: list[int]) -> np.ndarray:
        array = np.frombuffer(self.arrays[name].tobytes(), _dtype(dtype)).reshape(shape).copy()
        self.objects[place] = array
        return array

    def _of_tensor(self, place: int, like: Any, name: str, dtype: str, shape: list[int]) -> torch.Tensor:
        kind = getattr(torch, dtype)
        if not isinstance(kind, torch.dtype):
            raise ValueError(f"the stored state is damaged: torch.{dtype} is no dtype")
        tensor = torch.from_numpy(self.arrays[name].copy()).view(kind).reshape(shape)
        self.objects[place] = tensor
        return tensor

    def _of_generator(self, place: int, like: Any, name: str, state: Any, seeds: Any) -> np.random.Generator:
        if name not in BIT_GENERATORS:
            raise ValueError(f"the stored state is damaged: there is no generator {name!r}")
        state, seeds = _placed(self.value(state, None)), self.value(seeds, None) or {"entropy": 0}
        if seeds.get("pool_size", 4) not in range(4, 65):
            raise ValueError(f"the stored state is damaged: a pool of {seeds['pool_size']} numbers")
        sequence: Any = np.random.SeedSequence
        bits = getattr(np.random, name)(sequence(**seeds))
        bits.state = state
        generator = self.objects[place] = np.random.Generator(bits)
        return generator

    def _of_random_state(self, place: int, like: Any, state: Any) -> np.random.RandomState:
        generator = self.objects[place] = np.random.RandomState()
        generator.set_state(_placed(self.value(state, None)))
        return generator

    def _of_random(self, place: int, like: Any, state: Any) -> random.Random:
        generator = self.objects[place] = random.Random()
        generator.setstate(self.value(state, None))
        return generator

    def _of_torch_generator(self, place: int, like: Any, state: Any) -> torch.Generator:
        generator = self.objects[place] = torch.Generator()
        generator.set_state(self.value(state, None))
        return generator

    def _of_stays(self, place: int, like: Any, label: str) -> Any:
        here = label.startswith("(") or (like is not None and _label(like) == label)
        code = self.objects[place] = like if here else self.find_code(label)
        return code

    def _of_method(self, place: int, like: Any, of: Any, name: str) -> Any:
        of = self.value(of, getattr(like, "__self__", None))
        function = _method(of, name)
        if not isinstance(function, types.FunctionType):
            raise ValueError(f"the stored state is damaged: {_label(type(of))} has no method {name!r}")
        method = self.objects[place] = types.MethodType(function, of)
        return method

    def _of_object(self, place: int, like: Any, label: str, attributes: list[Any]) -> Any:
        if like is not None and _label(type(like)) == label and id(like) not in self.used:
            obj = like
        else:
            kind = self.find_code(label)
            if not isinstance(kind, type) or not _is_plain_class(kind) or kind.__new__ is not object.__new__:
                raise ValueError(f"the state has one {label} more than the environment that it is loaded into")
            obj = object.__new__(kind)
        self.objects[place] = obj
        self.used.add(id(obj))
        before = _attributes(obj)
        if hasattr(obj, "__dict__"):
            vars(obj).clear()
        slots = _slots(type(obj))
        for name, words in attributes:
            x = self.value(words, before.get(name))
            if name in slots:
                slots[name].__set__(obj, x)
            else:
                vars(obj)[name] = x
        return obj


def _method(of: Any, name: str) -> Any:
    """The attribute of a class with a name, looked up without calling descriptors."""
    return next((vars(kind)[name] for kind in type(of).__mro__ if name in vars(kind)), None)


def _label(x: Any) -> str:
    """The name of a class or a function; of another object that of its class, in brackets."""
    x = getattr(x, "__func__", x)
    if isinstance(x, types.ModuleType):
        return x.__name__
    if isinstance(x, type | types.FunctionType | types.BuiltinFunctionType):
        return f"{x.__module__}.{x.__qualname__}"
    return f"({_label(type(x))})"


def _is_plain_class(kind: type) -> bool:
    """Whether all that its instances hold are attributes: no class of its line is written in C."""
    holds = any("__dict__" in vars(c) for c in kind.__mro__) or bool(_slots(kind))
    return holds and all(c is object or (c.__flags__ & HEAP and c.__module__ != "builtins") for c in kind.__mro__)


def _slots(kind: type) -> dict[str, Any]:
    return {name: x for c in reversed(kind.__mro__) for name, x in vars(c).items()
            if isinstance(x, types.MemberDescriptorType)}  # fmt: skip


def _attributes(x: Any) -> dict[str, Any]:
    slots = {name: slot.__get__(x) for name, slot in _slots(type(x)).items() if hasattr(x, name)}
    return {**getattr(x, "__dict__", {}), **slots}


def _reachable(start: Any) -> Iterator[Any]:
    """All objects that a value holds."""
    seen, waiting = dict[int, Any](), [start]  # objects, so that no id is used twice
    while waiting:
        x = waiting.pop()
        if id(x) in seen or x is None or isinstance(x, bool | int | float | str | bytes | np.ndarray | torch.Tensor):
            if isinstance(x, enum.Enum):
                yield x
            continue
        seen[id(x)] = x
        yield x
        if isinstance(x, CODE):
            continue
        if isinstance(x, dict):
            waiting.extend(x.values())
        elif isinstance(x, list | tuple | set | frozenset | deque):
            waiting.extend(x)
        elif _is_plain_class(type(x)):
            waiting.extend(_attributes(x).values())


def _placed(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a bit generator. Raises ValueError if its next number is beyond its memory: NumPy would read it."""
    name, limit = PLACES.get(state["bit_generator"], ("", 0))
    place = {**state, **state["state"]}.get(name, 0)
    if not isinstance(place, int) or not 0 <= place <= limit:
        raise ValueError(f"the stored state is damaged: {name} is {place!r}; it must be from 0 to {limit}")
    return state


def _dtype(text: str, kinds: str = "biufcSUmM") -> np.dtype:
    dtype = np.dtype(text)
    if dtype.kind not in kinds:
        raise ValueError(f"the stored state is damaged: dtype {text!r}")
    return dtype
